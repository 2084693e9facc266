"""What applications import: the front doors and the searches above them."""
