"""Demo checkpoints, held-out text, templates of the collapse study, and the script of the screenshots."""
