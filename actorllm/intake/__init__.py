"""From the caller to the scheduler: prompts are read on lanes, off every event loop.

`job` is what a lane does for one request, `job_queue` decides which job comes next. `lanes` has the threads and what watches
them. `lane_process` (and its program, `lane_program`) reads what may take long, because a process can be killed.
"""
