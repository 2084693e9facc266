"""A small model that goes on with what its prompt repeats, trained here in some seconds: two layers of Llama.

    python bench/copying.py FOLDER [--threads 2]

It learns on random sequences that repeat themselves after a random number of tokens. Nothing but the sequence says what comes
next, so the model has to find where its newest token stood before, and to say what followed there. Two layers of attention are
the fewest that can (induction heads, arXiv:2209.11895). From random weights that takes minutes, most of which pass before
anything is copied. So the weights begin roughly as such heads have them: the first layer looks at the token before and remembers
it elsewhere, the second one compares that with the newest token. Trained until fresh sequences are copied as a whole.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

VOCAB_SIZE = 256
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "attention_bias": True,
    "tie_word_embeddings": True,
}
PERIODS = (8, 48)
"""Tokens after which a sequence repeats itself."""
ROWS, LENGTH = 32, 128
MOST_STEPS, WARM_UP, RATE = 1000, 30, 3e-3
CHECKED_EVERY, ENOUGH = 25, 0.999
"""Steps, and the share of tokens that must be copied."""
SCALE, SHARPNESS, NUM_NEAR = 0.1, 5.0, 4
"""Of embeddings at the beginning; of how the first layer looks at the token before, by so many of its fastest rotations."""


def make_copying_model(folder: Path, num_threads: int) -> Path:
    """Train it unless it is there. Returns the folder. Raises RuntimeError where it has not learned to copy."""
    if (folder / "complete").is_file():
        return folder
    import torch
    import torch.nn.functional as F

    before, began = torch.get_num_threads(), time.perf_counter()
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    model = _begun()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)

    def sequences() -> tuple[torch.Tensor, torch.Tensor]:
        """[ROWS, LENGTH] of ids, and which of them are copies."""
        ids = torch.stack([torch.randperm(VOCAB_SIZE)[: PERIODS[1]] for _ in range(ROWS)])
        periods = torch.randint(PERIODS[0], PERIODS[1] + 1, (ROWS, 1))
        places = torch.arange(LENGTH).expand(ROWS, -1)
        return ids.gather(1, places % periods), places >= periods

    def logits_and_targets() -> tuple[torch.Tensor, torch.Tensor]:
        ids, is_copy = sequences()
        wanted = is_copy[:, 1:] & is_copy[:, :-1]  # the first copy cannot be known to be one
        return model(ids, use_cache=False).logits[:, :-1][wanted], ids[:, 1:][wanted]

    share = 0.0
    for step in range(MOST_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP)
        logits, targets = logits_and_targets()
        loss = F.cross_entropy(logits, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % CHECKED_EVERY == CHECKED_EVERY - 1:
            with torch.no_grad():
                logits, targets = logits_and_targets()
            share = float((logits.argmax(1) == targets).float().mean())
            row = {"step": step + 1, "seconds": round(time.perf_counter() - began, 1), "copied": round(share, 4)}
            print(json.dumps(row | {"loss": round(loss.item(), 4)}), flush=True)
            if share >= ENOUGH:
                break
    torch.set_num_threads(before)
    if share < ENOUGH:
        raise RuntimeError(f"the model has not learned to copy: {share:.3f} of {ENOUGH} after {MOST_STEPS} steps")
    model.save_pretrained(folder)
    (folder / "complete").touch()
    return folder


def _begun() -> Any:
    """The model before its training."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SHAPE, bos_token_id=0, eos_token_id=0, pad_token_id=0))
    size, num_heads = SHAPE["hidden_size"], SHAPE["num_attention_heads"]
    whole, elsewhere = torch.eye(size), torch.linalg.qr(torch.randn(size, size))[0]
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, SCALE)
        first, second = (layer.self_attn for layer in model.model.layers)
        for one in (first, second):
            for product in (one.q_proj, one.k_proj, one.v_proj, one.o_proj):
                product.weight.mul_(0.1)
        # Rotated by one position, the bias of queries is that of keys.
        half = size // num_heads // 2
        angles = 10_000.0 ** (-torch.arange(half) / half)
        near = torch.where(torch.arange(half) < NUM_NEAR, SHARPNESS, 0.0)
        first.k_proj.bias.copy_(torch.cat((near, torch.zeros(half))).repeat(num_heads))
        first.q_proj.bias.copy_(torch.cat((near * angles.cos(), -near * angles.sin())).repeat(num_heads))
        first.v_proj.weight.add_(SCALE * whole)
        first.o_proj.weight.add_(elsewhere)
        second.q_proj.weight.add_(whole)
        second.k_proj.weight.add_(elsewhere.T)
        second.v_proj.weight.add_(SCALE * whole)
        second.o_proj.weight.add_(2 * whole)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    make_copying_model(arguments.folder, arguments.threads)


if __name__ == "__main__":
    main()
