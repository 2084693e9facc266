"""How the GPU path proves itself on the machine that it runs on.

`preflight` looks at the machine before anything is loaded. `self_check` runs every kernel of a model against torch at the start.
`memory` remembers what was found.
"""
