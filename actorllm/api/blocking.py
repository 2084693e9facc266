"""What the front doors that block have in common: `LLM` and `LLMEngine`."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from actorllm.api.engine_args import check_idle_arguments
from actorllm.api.worker_path import folder_to_reload, is_reload
from actorllm.client.collective_calls import Called, call_arguments, check_target, check_timeout_of_call
from actorllm.client.engine import Engine
from actorllm.client.metric_families import metrics_of
from actorllm.client.transports.jobs import RankJob
from actorllm.client.transports.table import transport_of
from actorllm.client.weight_updates import NewWeights
from actorllm.config import ModelConfig
from actorllm.errors import InvalidParameterError
from actorllm.scheduling.pause import PauseMode
from actorllm.supervision.health import EngineHealth
from actorllm.types.engine_metrics import Metric
from actorllm.types.lora_request import LoRARequest
from actorllm.types.sleep import SleepLevel, SleepTag
from actorllm.types.weight_version import RunningRequests


class BlockingDoor(ABC):
    """Questions to an engine, and orders, whose calls return when they are answered."""

    _engine: Engine

    @abstractmethod
    def shutdown(self, timeout: float = 5.0) -> None:
        """Stop the engine."""

    def drain(self, timeout: float | None = None) -> bool:
        """Take no new request and wait for the end of those there are; see `AsyncLLM.drain`.

        They are of other threads, or of an `LLMEngine`: their outputs come out of `step`, as always.

        Arguments:
            timeout: seconds after which what is left is aborted, each with its final output; None: no limit.

        Returns whether everything ended by itself.

        Raises:
            InvalidParameterError: the timeout is no number of seconds.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        return self._engine.wait_drained(timeout)

    @property
    def model_config(self) -> ModelConfig:
        """The model and what its config.json says about it."""
        return self._engine.config.model

    def get_tokenizer(self) -> Any:
        """The tokenizer as transformers has it.

        Raises:
            InvalidPromptError: the engine was built with skip_tokenizer_init.
        """
        return self._engine.prompts.transformers_tokenizer

    def health(self) -> EngineHealth:
        """The state of the engine and of each of its actors, and what has failed. Waits for nothing, starts nothing."""
        return self._engine.health()

    def check_health(self) -> None:
        """Whether the engine can serve.

        Raises:
            EngineDeadError, EngineShutdownError, ForkedProcessError: it cannot.
            EngineError: no prompt can be read.
        """
        self._engine.check_health()

    def stats(self) -> dict[str, Any]:
        """What every part of the engine counts. Workers answer between two steps: this waits for the one in flight.

        After `unload`, "scheduler" and "workers" are None; nothing is started.

        Raises:
            EngineDeadError, EngineShutdownError, ForkedProcessError: the engine is gone.
            EngineError: no replica runs now, since the machines of all are away; the engine goes on.
        """
        if self._engine.is_new:
            return {**self._engine.statistics(), "scheduler": None, "workers": None}
        scheduler = self._engine.ask_scheduler("statistics").result()
        workers = self._engine.ask_scheduler("worker_statistics", timeout=math.inf).result()
        return {**self._engine.statistics(), "scheduler": scheduler, "workers": workers}

    def get_metrics(self) -> list[Metric]:
        """What the engine counts, as vLLM's `get_metrics` returns it: one object for each value or histogram.

        After `unload` there is little to tell; nothing is started.

        Raises:
            EngineDeadError, EngineShutdownError, ForkedProcessError: the engine is gone.
        """
        model = self._engine.config.model
        return metrics_of(self.stats(), model.name, model.max_model_len)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached KV, as `AsyncLLM.reset_prefix_cache`. Returns whether it did.

        Arguments:
            reset_running_requests: compute the KV of running requests again, too; default False: they keep theirs, and leave none
                behind.
            reset_connector: True or False (default): what KV tiers have is forgotten in either case.

        Raises:
            InvalidParameterError: reset_connector is neither True nor False.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        check_idle_arguments(reset_connector=reset_connector)
        if self._engine.is_new:
            return True
        asked = self._engine.ask_scheduler("reset_prefix_cache", reset_running_requests=bool(reset_running_requests))
        return bool(asked.result())

    def reset_mm_cache(self) -> None:
        """Keep no images or recordings by their uuids (`multi_modal_uuids`): each has to be sent once more."""
        self._engine.reset_mm_cache()

    def reset_encoder_cache(self) -> None:
        """Keep no rows of images, recordings or texts that were encoded: each is encoded once more. Requests that run keep theirs.

        KV of them stays in the prefix cache; `reset_prefix_cache` forgets that.
        """
        self._engine.reset_encoder_cache()

    def set_policy(self, scheduling_policy: str | None = None, *, admission_policy: str | None = None) -> None:
        """Let another scheduling or admission policy decide from the next step on, as `AsyncLLM.set_policy`.

        Arguments:
            scheduling_policy: a name, or "module:Class"; None (default): it stays.
            admission_policy: likewise; "none": there is none any more; None (default): it stays.

        Raises:
            InvalidParameterError: neither is given, or there is no such policy, or it cannot be built; nothing has changed.
            EngineError: another change is under way, or the engine belongs to another process.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        self._engine.start()
        self._engine.set_policy(scheduling_policy, admission_policy).result()

    def update_weights_from_disk(
        self,
        folder: str | os.PathLike[str],
        *,
        version: str | None = None,
        running: RunningRequests = "recompute",
    ) -> str:
        """Compute every later token with the weights of a folder, as `AsyncLLM.update_weights_from_disk`. Returns the version.

        Arguments:
            folder: of safetensors files of the same model; it must not change before the next update.
            version: a name for it; None (default): the number of the update.
            running: what becomes of requests that have started: "recompute" (default), "keep" or "abort".

        Raises:
            InvalidParameterError: there is no such folder, or an argument has no such value.
            CorruptModelError: a tensor is missing or not as the model needs it; nothing has changed.
            EngineError: another update is under way, or a worker has ended meanwhile; nothing has changed.
            EngineDeadError, EngineShutdownError: the engine is gone.

        Example:
            llm.update_weights_from_disk("checkpoints/step-40", version="step-40")
        """
        return self._update_weights(lambda: NewWeights.of_folder(folder), version, running)

    def update_weights_from_tensors(
        self,
        tensors: Mapping[str, Any],
        *,
        transport: str = "shm",
        version: str | None = None,
        running: RunningRequests = "recompute",
    ) -> str:
        """Compute every later token with these tensors, as `AsyncLLM.update_weights_from_tensors`. Returns the version.

        Arguments:
            tensors: torch tensors by their names in the checkpoint, of any shape that they have there; they are copied. What is
                not given stays as it is.
            transport: "shm" (default), "gloo", "nccl" or "cuda_ipc".
            version: a name for it; None (default): the number of the update.
            running: what becomes of requests that have started: "recompute" (default), "keep" or "abort".

        Raises:
            InvalidParameterError: an argument, or a tensor, is not what it must be.
            CorruptModelError: a tensor is not as the model needs it; nothing has changed.
            EngineError: another update is under way, or a worker has ended meanwhile; nothing has changed.
            EngineDeadError, EngineShutdownError: the engine is gone.

        Example:
            llm.update_weights_from_tensors(policy.state_dict(), version="step-40")
        """
        read = partial(transport_of("transport", transport).whole, tensors, self._engine.weight_memory)
        return self._update_weights(read, version, running)

    def _update_weights(
        self, read: Callable[[], NewWeights | RankJob], version: str | None, running: RunningRequests
    ) -> str:
        self._engine.start()
        new = self._engine.read_weights(read, version, running).result()
        if isinstance(new, RankJob):
            new = self._engine.bring_weights(new).result()
        return self._engine.update_weights(new, version, running).result()

    @property
    def weight_version(self) -> str:
        """The name of the weights that new tokens are of; "0": those that the engine was built with."""
        return self._engine.weight_version

    def init_weight_transfer_engine(self, request: Any) -> None:
        """Get ready for updates in parts. Ranks that meet a trainer have met it when this returns.

        Arguments:
            request: {"init_info": {}} for tensors and files; for a trainer that broadcasts {"init_info": {"backend": "gloo",
                "master_address": "10.0.0.1", "master_port": 29600, "world_size": 3}}, or "nccl" (docs/weights.md).

        Raises:
            InvalidParameterError: there is no such backend, or it does not take this.
            EngineError: the ranks and the trainer did not meet.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        place = self._engine.weight_transfer.init(request)
        if place is not None:
            self._engine.start()
            self._engine.join_trainer(place).result()

    def shutdown_weight_transfer_engine(self) -> None:
        """Forget an update that was started and not finished, and leave the trainer that the ranks have met.

        Raises:
            EngineError: the ranks wait for that trainer; they do so no longer than its timeout.
        """
        self._engine.weight_transfer.close()
        if self._engine.has_trainer:
            self._engine.join_trainer(None).result()

    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        """Begin an update in parts; one that was not finished is forgotten.

        Arguments:
            is_checkpoint_format: True (default) alone: tensors have the names and shapes of the checkpoint. vLLM's trainers say so.

        Raises InvalidParameterError: another format.
        """
        self._engine.weight_transfer.start(is_checkpoint_format)

    def update_weights(self, request: Any) -> None:
        """Bring a part of the new weights, which is copied. Nothing changes before `finish_weight_update`.

        Arguments:
            request: {"update_info": {"tensors": {name: tensor}}}, or {"update_info": {"files": [path]}} of safetensors files; or
                what a trainer brings: {"update_info": {"names": [...], "dtype_names": [...], "shapes": [...]}}, and with
                "ipc_handles" what it shares on a GPU.

        Raises:
            InvalidParameterError: no update was started, or it was finished or started anew while the part was read; or the
                request or a tensor is not what it must be.
            EngineError: there is no memory for the part, or the trainer has ended or is silent; the parts before are kept.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        part = self._engine.weight_transfer.part(request)
        self._engine.start()
        job = self._engine.read_weights(part.bring, None, "recompute").result()
        if job is not None:
            keep = partial(part.keep, self._engine.bring_weights(job).result())
            self._engine.read_weights(keep, None, "recompute").result()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Compute every later token with all parts; requests that run are computed again (`update_weights_from_tensors`).

        Arguments:
            weight_version: a name for the version; None (default): the number of the update.

        Raises:
            InvalidParameterError: no update was started, no part has come, or there is no such name.
            CorruptModelError: a tensor is not as the model needs it; nothing has changed.
            EngineError: another update is under way, or a worker has ended meanwhile; nothing has changed.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        self._update_weights(self._engine.weight_transfer.finish, weight_version, "recompute")

    def update_weight_version(self, new_version: str) -> None:
        """Call the weights that count otherwise, for tokens from now on.

        Arguments:
            new_version: the name.

        Raises:
            InvalidParameterError: there is no such name.
            EngineError: an update is under way.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        self._engine.start()
        self._engine.name_weights(new_version).result()

    def get_weight_version(self) -> str:
        """As `weight_version`."""
        return self.weight_version

    def sleep(self, level: SleepLevel = 1, mode: PauseMode = "abort") -> int:
        """Give back the memory of the weights and of the KV cache, until `wake_up`, as `AsyncLLM.sleep`. Returns how many bytes.

        Requests that come meanwhile are refused.

        Arguments:
            level: 1 (default): what the system keeps in memory of the weights' files stays there; 2: it is given up, too. On a GPU,
                1 keeps a copy of the weights in the host's memory, and 2 none.
            mode: what becomes of the requests that there are: "abort" (default), "keep", or "wait" until they have finished.

        Raises:
            ConfigError: the engine was built without enable_sleep_mode.
            InvalidParameterError: an argument has no such value.
            UnsupportedModelError: level=2, and the weights of this model cannot be read again on its device; nothing sleeps.
            EngineError: a worker ended meanwhile; nothing sleeps.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        self._engine.start()
        return self._engine.sleep(level, mode, "refuse").result()

    def wake_up(self, tags: Sequence[SleepTag] | None = None) -> None:
        """Take memory again after `sleep`; nothing happens where nothing sleeps.

        Arguments:
            tags: "weights", "kv_cache"; None (default): both.

        Raises:
            InvalidParameterError: there is no such tag.
            CorruptModelError: the files of the weights have changed meanwhile.
            EngineError: a worker ended meanwhile, or the GPU has no memory for it; the engine goes on sleeping.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        if not self._engine.is_new:
            self._engine.wake_up(tags).result()

    def is_sleeping(self) -> bool:
        """Whether something of the engine sleeps. Starts nothing."""
        return self._engine.sleep_state.is_sleeping

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function on every rank of every replica, between two steps, as `AsyncLLM.collective_rpc`.

        Arguments:
            method: the name of a method of the worker, or the path of a function, 'module:function', which gets the worker first.
                vLLM's `reload_weights` reads the folder of the model again, as `update_weights_from_disk`.
            timeout: seconds after which the call is waited for no longer; None (default): any time.
            args, kwargs: JSON values, bytes, tensors and numpy arrays of numbers, of at most 48 MiB.

        Returns what each rank returned, in the order of replicas and ranks.

        Raises:
            InvalidParameterError: an argument is not what it must be.
            CollectiveCallError: the function raised on some rank; carries what each rank said.
            TimeoutError: the time is over.
            EngineError: a worker ended meanwhile.
            EngineDeadError, EngineShutdownError: the engine is gone.

        Example:
            workers = llm.collective_rpc("builtins:repr")
        """
        if is_reload(method, self._engine.config):
            folder = folder_to_reload(method, args, kwargs, self._engine.config)
            if folder is not None:
                self.update_weights_from_disk(folder)
            return [None] * (self._engine.config.world_size * self._engine.config.data_parallel_size)
        target = check_target("method", method, is_path=False)
        data, seconds = call_arguments(args, kwargs), check_timeout_of_call(timeout)
        self._engine.start()
        return self._results(self._engine.call_workers(target, data, timeout=seconds).result())

    def apply_model(self, func: str) -> list[Any]:
        """Call a function with the loaded model of every rank of every replica, between two steps.

        Arguments:
            func: the path of a function, 'module:function'.

        Returns what each rank returned, in the order of replicas and ranks.

        Raises:
            InvalidParameterError: it is no path; of a function, the message says the path.
            CollectiveCallError: the function raised on some rank; carries what each rank said.
            EngineError: a worker ended meanwhile.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        target = check_target("func", func, is_path=True)
        self._engine.start()
        return self._results(self._engine.call_workers(target, call_arguments((), None), is_of_model=True).result())

    def _results(self, called: Called) -> list[Any]:
        """Of a call. Weights that it has brought are a version from here on."""
        path, new_memory = called.weights, self._engine.weight_memory.new
        if path is not None:
            self._update_weights(lambda: NewWeights.of_worker(path, new_memory), None, "recompute")
        return called.results

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Have the workers read an adapter before a request comes with it, as `AsyncLLM.add_lora`.

        Arguments:
            lora_request: as in `generate`.

        Raises:
            InvalidParameterError: the engine takes no adapters, or not this one; or all that it keeps (max_cpu_loras) are pinned.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        self._engine.start()
        adapter = self._engine.read_adapter(lora_request).result()
        return bool(self._engine.ask_for_adapter("add_adapter", adapter).result())

    def remove_lora(self, lora_id: int) -> bool:
        """Let the workers forget an adapter, as `AsyncLLM.remove_lora`. Returns whether they had kept it.

        Arguments:
            lora_id: the lora_int_id of a request of this program.

        Raises:
            InvalidParameterError: the engine takes no adapters.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        adapter = self._engine.adapter_of_number(lora_id)
        if adapter is None:
            return False
        self._engine.start()
        self._engine.forget_adapter(lora_id)
        return bool(self._engine.ask_for_adapter("remove_adapter", adapter).result())

    def list_loras(self) -> set[int]:
        """The adapters that the workers keep, by the lora_int_id of this program's requests, as `AsyncLLM.list_loras`.

        Raises:
            InvalidParameterError: the engine takes no adapters.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        self._engine.start()
        digests = self._engine.ask_scheduler("list_adapters").result()
        return self._engine.numbers_of_adapters(digests)

    def pin_lora(self, lora_id: int) -> bool:
        """Let the workers keep an adapter whatever comes, until it is removed or they end, as `AsyncLLM.pin_lora`.

        Arguments:
            lora_id: the lora_int_id of a request of this program.

        Raises:
            InvalidParameterError: the engine takes no adapters, or knows none of this number; or all that it keeps are pinned.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        adapter = self._engine.adapter_of_number(lora_id)
        if adapter is None:
            raise InvalidParameterError(f"lora_id={lora_id!r:.100} is no adapter of this program; add it with add_lora")
        self._engine.start()
        return bool(self._engine.ask_for_adapter("pin_adapter", adapter).result())

    def scale(self, num_replicas: int) -> None:
        """Have so many replicas, as `AsyncLLM.scale`.

        Arguments:
            num_replicas: 1 to 64.

        Raises:
            InvalidParameterError: no such number, or an engine with topology="inline".
            EngineError: the engine belongs to another process, or has one replica and another program has joined it.
            EngineDeadError: a new replica did not start; the others go on.
        """
        self._engine.start()
        self._engine.scale(num_replicas).result()

    def drain_replica(self, number: int, is_draining: bool = True) -> None:
        """Let a replica take no new requests, and move its streams to others, as `AsyncLLM.drain_replica`.

        Arguments:
            number: of the replica, as in `health().replicas`.
            is_draining: default True; False: it takes requests again.

        Raises:
            InvalidParameterError: there is no such replica, or no other one that takes requests.
        """
        self._engine.start()
        self._engine.drain_replica(number, is_draining).result()

    def unload(self, timeout: float = 5.0) -> None:
        """Stop everything and give its memory back; the next request starts the engine again, as `AsyncLLM.unload`.

        Arguments:
            timeout: seconds after which processes that do not stop by themselves are killed; default 5.

        Raises:
            EngineError: a request is open, another thread waits for the start, a program has joined the engine, or it is
                attached; nothing is changed then.
            EngineDeadError, EngineShutdownError, ForkedProcessError: the engine is gone.

        Example:
            llm.unload()
        """
        self._engine.unload(timeout)

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Trace every torch operation of the workers, until `stop_profile`.

        The engine must have profiler_config={'profiler': 'torch', 'torch_profiler_dir': FOLDER}.

        Arguments:
            profile_prefix: what the names of the files begin with: up to 128 letters, digits, ".", "_" and "-"; None: the time.
            delay_iterations, max_iterations: accepted at None and 0, where they ask for nothing.

        Raises:
            ConfigError: the engine was built without profiler_config.
            InvalidParameterError: an argument is wrong.
            EngineError: a profile is under way, or the engine is gone.
        """
        self._engine.start()
        self._engine.start_profile(profile_prefix, delay_iterations, max_iterations).result()

    def stop_profile(self) -> None:
        """Write the traces, one file per rank in the format of chrome://tracing.

        Raises:
            EngineError: there is no profile, or the engine is gone.
        """
        self._engine.stop_profile().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
