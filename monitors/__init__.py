"""What is measured on a live model and how it is judged: one file per detector."""
