"""The script that Streamlit runs, in a folder of its own."""
