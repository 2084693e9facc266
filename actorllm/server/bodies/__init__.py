"""Bodies of HTTP requests: read, bounded, and parsed where no stream waits for it.

Reading order: how much of what a body may hold (`limits`), and a large body on its way between processes (`body_codec`). Then
comes the program that parses large bodies (`frames` and `parse_process`). It imports nothing else of this package, so that it
starts quickly. Last come a child that answers questions (`owned_process`) and what an endpoint calls (`reader`).
"""
