"""Figures: pure functions from tables to plotly figures; no Streamlit, no torch.

Every text of a token passes through `token_label`, so that plotly never reads it as markup.
"""
