"""The model runner: what a worker actor drives, one `StepPlan` in, one `StepResult` out.

Reading order: runner -> inputs -> families.decoder_config -> families.tensors -> linear, then a backend: cpu.runner ->
cpu.decoder -> cpu.attention, or cuda.runner -> cuda.decoder. `hf` is the way of models without a fused forward; `registry`
chooses. `threads` and `backends` are free of torch. Nothing here knows of rings, actors or the scheduler.
"""
