"""The model runner: what a worker actor drives, one `StepPlan` in, one `StepResult` out.

Reading order: runner -> inputs -> attention -> decoder -> llama and its kin -> layers -> weights. `transformers_backend`,
its `probe` and `packing` are the way of models without a fused forward. `threads` is free of torch and runs before the
worker process is started. Nothing here knows of rings, actors or the scheduler.
"""
