"""The two endpoints: a form with a recording in, its text out."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from anyio import to_thread
from fastapi import APIRouter, Request, Response

from actorllm.errors import ActorLLMError
from actorllm.intake.media.addresses import Allowed
from actorllm.intake.media.audio import read_audio
from actorllm.server.audio.asked import KNOWN, AskedSpeech, SpeechTokens, Task, read_asked
from actorllm.server.audio.form import FILE, read_form
from actorllm.server.audio.speech_answer import Speech, SpeechAnswer
from actorllm.server.audio.windows import MAX_WINDOWS, windows_of
from actorllm.server.envelope import ApiError, error_of
from actorllm.server.operations import state_of
from actorllm.server.random_names import random_name
from actorllm.server.sampling import objective_of, short_name
from actorllm.server.state import ServerState
from actorllm.types.model_files import read_object

router = APIRouter()

FORM = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": {"type": "object"}}}}}


@router.post("/v1/audio/transcriptions", openapi_extra=FORM)
async def transcribe(request: Request) -> Response:
    """The text of a recording, in its language."""
    return await _answered(request, "transcribe")


@router.post("/v1/audio/translations", openapi_extra=FORM)
async def translate(request: Request) -> Response:
    """The text of a recording, in English."""
    return await _answered(request, "translate")


async def _answered(request: Request, task: Task) -> Response:
    state = state_of(request)
    rules = state.engine.config.model.encoder_decoder
    if rules is None or rules.kind != "audio":
        raise ApiError(
            404, "the model of this server takes no recordings at this endpoint; serve a Whisper model for that"
        )
    with state.admitted():
        body = await state.bodies.read_bytes(request)
        form = read_form(request.headers.get("content-type", ""), body)
        asked = read_asked(form, task)
        name = state.check_model(asked.model)
        try:
            read = partial(_read, state, asked)
            speech = await to_thread.run_sync(read, limiter=state.decoding_turn)
            arguments = {"slo": objective_of(None, request.headers)}
        except ActorLLMError as error:
            raise error_of(error, KNOWN, FILE) from error
    given = request.headers.get("x-request-id")
    called = f"trsc-{random_name()}" if given is None else short_name(given)
    return SpeechAnswer(state, called, name, speech, arguments, {"x-request-id": called})


def _read(state: ServerState, asked: AskedSpeech) -> Speech:
    """Decode a recording, and cut it. Runs on a thread of its own."""
    model, sources = state.engine.config.model, state.engine.prompts.sources
    assert model.encoder_decoder is not None
    assert sources is not None
    tokens = SpeechTokens(state.engine.prompts.tokenizer)
    language = tokens.checked_language(asked.language)
    rate, seconds = int(sources.extractor.sampling_rate), float(sources.extractor.chunk_length)
    samples = read_audio(asked.file, rate, MAX_WINDOWS * seconds, Allowed(), FILE)
    tree = read_object(Path(model.path) / "generation_config.json", is_optional=True)
    listed = tree.get("suppress_tokens")
    suppressed = (
        tuple(id for id in listed if type(id) is int and 0 <= id < model.vocab_size) if isinstance(listed, list) else ()
    )
    windows = windows_of(samples, rate, seconds)
    rules = model.encoder_decoder
    return Speech(asked, tokens, windows, rate, language, rules.max_target, suppressed, seconds / rules.max_source)
