"""Ways of new weights to the ranks, one module each, and the table of them (`table`). A part of the front doors."""
