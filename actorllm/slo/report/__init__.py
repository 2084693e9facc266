"""Reports: pages that hold everything they show, and files for other programs.

    sweep_page(results)     a page on a sweep: which policy keeps its promises up to which rate, and why
    run_page(title, timeline, workload, journal, model, stamp)      a page on one run, simulated or live
    bench_json, results_csv, requests_csv, chrome_trace             for scripts, spreadsheets and Perfetto

Called by `actorllm simulate`, `sweep`, `report`, `explain` and `replay`.
"""

from actorllm.slo.report.formats import bench_json, chrome_trace, requests_csv, results_csv
from actorllm.slo.report.run_page import run_page
from actorllm.slo.report.sweep_page import sweep_page

__all__ = ("bench_json", "chrome_trace", "requests_csv", "results_csv", "run_page", "sweep_page")
