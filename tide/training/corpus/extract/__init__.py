"""Extractors: each takes the files of a package and yields documents, a document being its paragraphs in order."""
