"""What a model's head makes of its final states: a score for each of its labels, of a whole prompt or of every token.

`read_head` reads it from config.json: the labels, and by which function scores become probabilities. That is looked for in
vLLM's order: problem_type, then what sentence-transformers writes. The head's weights are read by `model.heads` and by
`model.hf.encoder`. Called by `pooling_params`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actorllm.errors import CorruptModelError, UnsupportedModelError

SEQUENCE_HEAD, TOKEN_HEAD = "ForSequenceClassification", "ForTokenClassification"
"""What the names of architectures with a head for labels end with."""

REWARD_HEADS = {"Qwen2ForRewardModel": 1, "Qwen2ForProcessRewardModel": 2}
"""Architectures of reward models whose head has a layer between the states and the scores of each token: how many scores."""

WITHOUT_ACTIVATION = ("Qwen2ForRewardModel",)
"""Of these the scores are rewards, and stay as they are unless something else is asked for."""
STEP_TAGS = {"Qwen2ForProcessRewardModel": 151651}
"""Of process reward models, the token that ends a step of reasoning: the scores are its, as in vLLM."""

MAX_LABELS = 1 << 16

MAX_VECTOR_BYTES = 16 << 20
"""Of the vectors or scores of one step, which are one message."""

PROBLEMS = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
"""By problem_type: what makes probabilities of scores. softmax over one label is sigmoid."""

TORCH_FUNCTIONS = {"Identity": "identity", "Sigmoid": "softmax", "Softmax": "softmax"}
"""The same by the class of torch.nn that a cross-encoder of sentence-transformers names, as vLLM understands it."""

TWO_WAY = "from_2_way_softmax"
"""One label, whose score is how much the head for text prefers the second of two tokens."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a classifier, a cross-encoder, a reward model or a tagger."""

    labels: tuple[str, ...]
    """Names of its scores, in their order."""
    is_of_tokens: bool = False
    """Every token has scores; False: the prompt has."""
    activation: str = "softmax"
    """"identity", "softmax" (sigmoid with one label) or "sigmoid": what makes probabilities of scores."""
    tokens: tuple[str, ...] = ()
    """The head is made of these rows of the head for text, which are the vocabulary's."""
    is_two_way: bool = False
    """Of two tokens, the second row less the first."""
    has_layer: bool = False
    """It has two products, and a ReLU between them."""

    @classmethod
    def from_tree(cls, tree: dict[str, Any] | None) -> Head | None:
        """From what `dataclasses.asdict` and JSON make of one."""
        if tree is None:
            return None
        return cls(**(tree | {"labels": tuple(tree["labels"]), "tokens": tuple(tree["tokens"])}))

    @property
    def size(self) -> int:
        """Scores of a prompt, or of a token."""
        return len(self.labels)


def read_head(architecture: str, hf: Mapping[str, Any]) -> Head | None:
    """None: the architecture has no head for labels. hf: config.json. Raises ModelError."""
    if architecture in REWARD_HEADS:
        labels = _labels({**hf, "num_labels": REWARD_HEADS[architecture]}, (), False)
        return Head(labels, is_of_tokens=True, activation=_activation(hf), has_layer=True)
    is_of_tokens = architecture.endswith(TOKEN_HEAD)
    if not is_of_tokens and not architecture.endswith(SEQUENCE_HEAD):
        return None
    tokens, is_two_way = _tokens(hf)
    return Head(_labels(hf, tokens, is_two_way), is_of_tokens, _activation(hf), tokens, is_two_way)


def _tokens(hf: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """How a head is made of the one for text, as vLLM's hf_overrides for rerankers say it."""
    tokens = hf.get("classifier_from_token")
    if tokens is None:
        return (), False
    if not isinstance(tokens, list | tuple) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise CorruptModelError(f"classifier_from_token={tokens!r:.80} must be a list of tokens")
    method = hf.get("method") or (TWO_WAY if hf.get("is_original_qwen3_reranker") else "no_post_processing")
    if method not in (TWO_WAY, "no_post_processing"):
        raise UnsupportedModelError(f"method={method!r:.80} is not supported; use {TWO_WAY!r} or 'no_post_processing'")
    if method == TWO_WAY and len(tokens) != 2:
        raise CorruptModelError(f"classifier_from_token={tokens!r:.80}: method={TWO_WAY!r} needs two tokens")
    return tuple(tokens), method == TWO_WAY


def _labels(hf: Mapping[str, Any], tokens: tuple[str, ...], is_two_way: bool) -> tuple[str, ...]:
    names = hf.get("id2label")
    count = hf.get("num_labels", len(names) if isinstance(names, Mapping) and names else 2)
    if tokens:
        count = 1 if is_two_way else len(tokens)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count <= MAX_LABELS:
        raise CorruptModelError(f"config.json: {count!r:.80} labels; a number from 1 to {MAX_LABELS} is needed")
    if not isinstance(names, Mapping):
        names = {}
    return tuple(str(names.get(str(i), names.get(i, f"LABEL_{i}"))) for i in range(count))


def _activation(hf: Mapping[str, Any]) -> str:
    problem = hf.get("problem_type")
    if problem in PROBLEMS:
        return PROBLEMS[problem]
    sentence = hf.get("sentence_transformers")
    name = sentence.get("activation_fn") if isinstance(sentence, Mapping) else None
    name = name or hf.get("sbert_ce_default_activation_function")
    if name is None:
        return "softmax"
    # Other modules may hold weights or run code: only those are known that need neither.
    known = TORCH_FUNCTIONS.get(str(name).rsplit(".", 1)[-1])
    if known is None or not str(name).startswith("torch.nn.modules."):
        raise UnsupportedModelError(
            f"config.json: the activation function {name!r:.80} is not supported; torch.nn.modules' Identity, Sigmoid and "
            f"Softmax are"
        )
    return known
