"""Streamlit components of our own. Each is a Python file with its JavaScript and CSS beside it."""
