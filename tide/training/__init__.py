"""Training: the corpus, the tokenizer, the data and the loop."""
