"""Draws docs/pictures/timeline.svg from a run of the storyteller: python docs/site/pictures.py [FILE]

The run is recorded as `actorllm generate --timeline FILE` records it, with six streams and a long prompt that arrives
beside them. Perfetto shows such a file with its own means; this draws a few steps of it to be looked at in a page.
docs/pictures/live.png is a screenshot of the live page (tests/server/test_page.py).
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from actorllm import SamplingParams
from actorllm.cli.options import GenerationRun
from actorllm.client.engine import Engine
from actorllm.config import EngineConfig

TARGET = Path(__file__).resolve().parents[1] / "pictures" / "timeline.svg"
SCHEDULER, WORKER = 1, 2
"""The tracks of a timeline (`actorllm.actors.timeline`)."""

WIDTH, LEFT, ROW, TOP = 960, 132, 34, 52
LANES = ("plan", "update", "detokenize", "send", "step")
COLOURS = {"plan": "#7c5cd6", "update": "#1f8a5b", "detokenize": "#c2571a", "send": "#8a8f98", "step": "#3b6fe0"}
PREFILL = "#b8740f"
STEPS_BEFORE, STEPS_SHOWN = 3, 11
NUM_RUNS = 30


Events = list[dict[str, Any]]


def record() -> list[Events]:
    """The events of each run, in the Trace Event Format."""
    options: Any = {"num_threads": 1, "max_num_seqs": 16, "max_num_batched_tokens": 64, "dtype": "float32"}
    engine = Engine(EngineConfig.from_arguments("storyteller", **options))
    engine.start()
    all_stream = threading.Barrier(7)

    def stream(seed: int) -> None:
        if seed == 6:
            all_stream.wait()  # until the others have their first tokens
        prompt = "Once upon a time there was a king" if seed < 6 else "There was a miller with three sons. " * 12
        params = SamplingParams(max_tokens=80 if seed < 6 else 8, ignore_eos=True, seed=seed)
        for number, _ in enumerate(GenerationRun(engine, prompt, params)):
            if number == 10 and seed < 6:
                all_stream.wait()

    try:
        for _ in GenerationRun(engine, "Once", SamplingParams(max_tokens=4)):
            pass  # the first steps of an engine are slower
        runs = []
        for _ in range(NUM_RUNS):
            engine.ask_scheduler("reset_prefix_cache").result()
            engine.ask_scheduler("start_timeline").result()
            with ThreadPoolExecutor(7) as threads:
                list(threads.map(stream, range(7)))
            runs.append(list(engine.ask_scheduler("take_timeline").result()))
        return runs
    finally:
        engine.shutdown()


def interesting(events: Events) -> tuple[Events, set[int]]:
    """The spans of the steps around the first one with a chunk of the long prompt, and which steps have such a chunk."""
    spans = [event for event in events if event["ph"] == "X"]
    plans = {event["args"]["step"]: event["args"] for event in spans if event["name"].startswith("plan ")}
    prefills = {step for step, plan in plans.items() if plan["tokens"] > plan["decode_rows"]}
    first = min(step for step in prefills if plans[step]["decode_rows"] >= 4) - STEPS_BEFORE
    return [event for event in spans if first <= event["args"]["step"] < first + STEPS_SHOWN], prefills


def duration(shown: Events) -> float:
    return float(max(event["ts"] + event["dur"] for event in shown) - min(event["ts"] for event in shown))


def drawn(runs: list[Events]) -> str:
    """The quietest of the runs, as SVG."""
    shown, prefills = min(map(interesting, runs), key=lambda found: duration(found[0]))
    steps = [event for event in shown if event["pid"] == WORKER]
    begin, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    shown = [event for event in shown if begin <= event["ts"] < end]
    scale = (WIDTH - LEFT - 16) / (end - begin)
    height = TOP + ROW * len(LANES) + 34

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#fff" stroke="#d8dbe0"/>',
        '<text x="16" y="26" font-size="14" font-weight="bold" fill="#1b1f27">Scheduler and worker, step by step</text>',
    ]
    keys = {"decode": COLOURS["step"], "with a chunk of a prompt": PREFILL}
    for i, (name, colour) in enumerate(keys.items()):
        x = WIDTH - 290 + 90 * i
        parts.append(f'<rect x="{x}" y="16" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="26" fill="#5b6270">{name}</text>')
    tick = next(us for us in (5000, 20_000, 50_000, 100_000) if end - begin < 12 * us)
    for number in range(int((end - begin) // tick) + 1):
        x = LEFT + number * tick * scale
        parts.append(f'<path d="M{x:.1f} {TOP - 8}V{height - 28}" stroke="#eceef1"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{height - 12}" text-anchor="middle" fill="#5b6270">{number * tick // 1000} ms</text>'
        )
    for i, lane in enumerate(LANES):
        label = f"worker: {lane}" if lane == "step" else f"scheduler: {lane}"
        parts.append(f'<text x="16" y="{TOP + ROW * i + 17}" fill="#1b1f27">{label}</text>')
    for event in shown:
        lane, number = event["name"].split()
        x, width = LEFT + (event["ts"] - begin) * scale, max(1.0, event["dur"] * scale)
        y = TOP + ROW * LANES.index(lane)
        colour = PREFILL if lane == "step" and int(number) in prefills else COLOURS[lane]
        title = f"{event['name']}: {event['dur'] / 1000:.2f} ms"
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="24" fill="{colour}"><title>{title}</title></rect>'
        )
        if lane == "step" and width > 21:
            parts.append(f'<text x="{x + width / 2:.1f}" y="{y + 16}" text-anchor="middle" fill="#fff">{number}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main(target: Path) -> None:
    target.write_text(drawn(record()))
    print(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
