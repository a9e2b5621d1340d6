"""The script that Streamlit runs once for every change in a session.

It lies in a folder of its own: Streamlit takes a folder `pages` beside its script for pages of its older kind and
would run the modules of `dashboard/pages` bare, without the frame.
"""

import sys
from pathlib import Path

from dashboard.app import run

run([Path(argument) for argument in sys.argv[1:]])
