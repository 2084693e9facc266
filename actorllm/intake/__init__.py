"""From the caller to the scheduler: prompts are read by tokenizer workers, off every event loop.

`job` is what a tokenizer worker does for one request, `job_queue` decides which job comes next. `tokenizer_pool` has these
threads and what watches them. `intake_process` (and its program, `intake_program`) reads what may take long, because a
process can be killed.
"""
