"""How fast is a decode step of a model with an encoder beside its decoder, against transformers' own `generate` with its cache?

Models of the shapes of BART-base, T5-base and Whisper-small, with random weights. Both sides have as many rows of
the encoder and write as many tokens. Sides take turns, in one process. A time is that of a long output less that of a short one, by
token, so that neither prompts nor the encoder count. The table has the median of all rounds.
Run: python bench/encoder_decoder.py [--json FILE] [--threads 1] [--dtype float32] [--rounds 3]
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import command, environment

from actorllm import LLM, SamplingParams

SHORT, LONG = 8, 40
BATCHES = (1, 16)
NUM_SOURCE = 200
"""Tokens of a text for an encoder."""


def configurations() -> dict[str, Any]:
    """Of transformers, with weights drawn later."""
    import transformers as t

    return {
        "bart-base": t.BartConfig(
            d_model=768, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=3072, decoder_ffn_dim=3072,
            encoder_attention_heads=12, decoder_attention_heads=12,
        ),
        "t5-base": t.T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0),
        "whisper-small": t.WhisperConfig(
            d_model=768, encoder_layers=12, decoder_layers=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072,
            encoder_attention_heads=12, decoder_attention_heads=12, suppress_tokens=None, begin_suppress_tokens=None,
        ),
    }  # fmt: skip


def save(config: Any, folder: Path) -> None:
    """A folder with the configuration alone: weights are drawn from a seed."""
    import transformers as t

    names = {
        "bart": "BartForConditionalGeneration",
        "t5": "T5ForConditionalGeneration",
        "whisper": "WhisperForConditionalGeneration",
    }
    config.architectures = [names[config.model_type]]
    config.save_pretrained(folder)
    if config.model_type == "whisper":
        t.WhisperFeatureExtractor().save_pretrained(folder)


def seconds_of(work: Any, count: int) -> float:
    began = time.perf_counter()
    work(count)
    return time.perf_counter() - began


class Sides:
    """Both, for one model and one number of requests."""

    def __init__(self, llm: LLM, model: Any, batch: int) -> None:
        self._llm, self._model, self._batch = llm, model, batch
        rng = np.random.default_rng(0)
        rules = llm.config.model.encoder_decoder
        assert rules is not None
        self._start = list(rules.start_ids)
        if rules.kind == "audio":
            sounds = [rng.normal(0, 0.1, 16_000).astype(np.float32) for _ in range(batch)]
            self._prompts: list[Any] = [
                {"encoder_prompt": {"multi_modal_data": {"audio": one}}, "decoder_prompt": self._start}
                for one in sounds
            ]
            rows = rules.max_source
        else:
            ids = [rng.integers(10, llm.config.model.vocab_size, NUM_SOURCE).tolist() for _ in range(batch)]
            self._prompts = [{"encoder_prompt": one, "decoder_prompt": self._start} for one in ids]
            rows = NUM_SOURCE
        # Releases of transformers call it by other names.
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._states = torch.randn(batch, rows, model.config.d_model).to(model.dtype)

    def ours(self, count: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        self._llm.generate(self._prompts, params, use_tqdm=False)

    @torch.inference_mode()
    def stock(self, count: int) -> None:
        """By its own modules and cache, one token after the other."""
        from transformers.modeling_outputs import BaseModelOutput

        ids = torch.tensor([self._start] * self._batch)
        cache = None
        for _ in range(count):
            made = self._model(
                encoder_outputs=BaseModelOutput(last_hidden_state=self._states),
                decoder_input_ids=ids,
                use_cache=True,
                **({} if cache is None else {self._cache_name: cache}),
            )
            cache = made[self._cache_name]
            ids = made.logits[:, -1:].argmax(-1)

    def measure(self, rounds: int) -> dict[str, float]:
        """Milliseconds of a step, by side."""
        found: dict[str, list[float]] = {"ours": [], "transformers": []}
        sides = {"ours": self.ours, "transformers": self.stock}
        for work in sides.values():
            work(SHORT)
        for _ in range(rounds):
            for name, work in sides.items():
                step = (seconds_of(work, LONG) - seconds_of(work, SHORT)) / (LONG - SHORT)
                found[name].append(1000 * step)
        return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    import transformers as t

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", default="bart-base,t5-base,whisper-small")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in arguments.models.split(","):
        config = configurations()[name]
        with tempfile.TemporaryDirectory() as folder:
            save(config, Path(folder))
            auto: Any = t.AutoModelForSpeechSeq2Seq if name.startswith("whisper") else t.AutoModelForSeq2SeqLM
            model = auto.from_config(config, dtype=getattr(torch, arguments.dtype)).eval()
            with LLM(
                folder,
                load_format="dummy",
                topology="inline",
                skip_tokenizer_init=True,
                num_threads=arguments.threads,
                dtype=arguments.dtype,
                max_num_seqs=max(BATCHES),
            ) as llm:
                sides = found[name] = {}
                for batch in BATCHES:
                    ms = sides[str(batch)] = Sides(llm, model, batch).measure(arguments.rounds)
                    ratio = ms["transformers"] / ms["ours"]
                    print(
                        f"{name:14} batch {batch:2}  {ms['ours']:8.2f} ms  transformers {ms['transformers']:8.2f} ms  "
                        f"{ratio:5.2f}x"
                    )
    if arguments.json is not None:
        tree = {"command": command(), "environment": environment(), "dtype": arguments.dtype, "found": found}
        arguments.json.write_text(json.dumps(tree, indent=1) + "\n")


if __name__ == "__main__":
    main()
