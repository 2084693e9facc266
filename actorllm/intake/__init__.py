"""From the caller to the scheduler: prompts are read on lanes, off every event loop.

`job` is what a lane does for one request, `job_queue` which job comes next, `lanes` the threads and what watches them,
`lane_process` (and its program, `lane_program`) where what may take long is read, because a process can be killed.
"""
