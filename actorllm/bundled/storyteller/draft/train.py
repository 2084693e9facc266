"""Train the draft model of the storyteller: one layer, half a million parameters, the tokenizer of its target.

    python train.py --corpus corpus.txt.xz --heldout heldout.txt --out draft --threads 2

It learns what the target would say next, and not what the corpus says: a draft is right where both draw the same token. So the
loss is the divergence of their distributions at the temperature at which stories are sampled. `overlap` is the share of
probability that both have in common on held-out text, which no drafter can exceed by much.
"""

import argparse
import json
import lzma
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

END = "<|endoftext|>"
TEMPERATURE = 0.8
SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def read(path):
    opened = lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8")
    with opened as file:
        return file.read()


def encode(tokenizer, text):
    """One array of ids; the tokenizer begins each story with the end of text."""
    stories = [story.strip() for story in text.split(f"\n{END}\n")]
    return np.concatenate([e.ids for e in tokenizer.encode_batch(stories)]).astype(np.int64)


def main():
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="a text file, or one packed with xz")
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--target", type=Path, default=here.parent, help="the folder of the target")
    parser.add_argument("--out", type=Path, default=here)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    random = np.random.default_rng(args.seed)
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    train, heldout = (encode(tokenizer, read(path)) for path in (args.corpus, args.heldout))
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16).eval()
    of = target.config
    shared = ("vocab_size", "max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id")
    config = LlamaConfig(**SHAPE, **{name: getattr(of, name) for name in shared}, tie_word_embeddings=True)
    config.rope_parameters = of.rope_parameters
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # begin with the directions in which the target's embeddings differ most
        embeddings = target.model.embed_tokens.weight.float()
        *_, directions = torch.linalg.svd(embeddings - embeddings.mean(0), full_matrices=False)
        narrow = embeddings @ directions[: config.hidden_size].T
        model.model.embed_tokens.weight.copy_(0.05 * narrow / narrow.std())
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(train):,} tokens of text", flush=True)

    def both(ids):
        """The distributions of the target, and the logarithms of those of the draft model."""
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                wanted = target(ids, use_cache=False).logits
            mine = model(ids, use_cache=False).logits
        return (wanted.float() / TEMPERATURE).softmax(-1), (mine.float() / TEMPERATURE).log_softmax(-1)

    @torch.no_grad()
    def overlap():
        size = args.length
        rows = torch.from_numpy(heldout[: len(heldout) // size * size].reshape(-1, size)[:64])
        found = [both(part) for part in rows.split(args.rows)]
        return float(torch.stack([torch.minimum(p, q.exp()).sum(-1).mean() for p, q in found]).mean())

    began = time.time()
    for step in range(args.steps):
        rate = min((step + 1) / 100, 0.02 + 0.49 * (1 + math.cos(math.pi * step / args.steps)))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate
        starts = random.integers(len(train) - args.length, size=args.rows)
        ids = torch.from_numpy(np.stack([train[start : start + args.length] for start in starts]))
        wanted, mine = both(ids)
        loss = F.kl_div(mine, wanted, reduction="sum") / ids.numel()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99 or step == args.steps - 1:
            row = {"step": step + 1, "minutes": round((time.time() - began) / 60, 2), "divergence": round(loss.item(), 4)}
            print(json.dumps(row | {"overlap": round(overlap(), 4)}), flush=True)
    model.to(torch.bfloat16).save_pretrained(args.out)


if __name__ == "__main__":
    main()
