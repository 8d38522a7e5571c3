"""Evaluate sharded models on tasks of lm-evaluation-harness: each data-parallel rank answers a part of the requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import datasets
import torch
import torch.distributed as dist
from lm_eval.api import task as task_module
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from megatron_zpp.data.text.tokenizers import Tokenizer
from megatron_zpp.zeropp.fsdp.topology import gather_objects

Request = TypeVar("Request")
Answer = TypeVar("Answer")
Scored = tuple[Any, list[int], list[int]]  # the texts, tokens of the context, tokens of the continuation
FEWSHOT_SEED = 1234  # the harness's own


class Tasks:
    """Tasks of the harness, loaded. Raises ValueError for one that does not exist.

    folder: with YAML files of tasks; without it those that the harness brings along.
    limit: documents of each task, the first ones; None: all. length: tokens that the model will see at once.
    """

    def __init__(
        self, names: Iterable[str], folder: str | None = None, limit: int | None = None, *, length: int
    ) -> None:
        datasets.disable_progress_bars()  # every rank would show its own
        task_module.tqdm = partial(task_module.tqdm, disable=True)
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"--eval-tasks-path {folder} is no folder: give the one with the tasks' YAML files")
        manager, self._limit = TaskManager(include_path=folder, include_defaults=folder is None), limit
        try:
            self._loaded = manager.load(list(names))
        except KeyError as error:
            known = "" if folder is None else f"; there are {', '.join(manager.all_tasks) or 'none'}"
            raise ValueError(f"--eval-tasks: {error.args[0]}{known}") from error
        for name, task in self._loaded["tasks"].items():
            if task.OUTPUT_TYPE == "generate_until":
                longest = normalize_gen_kwargs(task.get_config("generation_kwargs") or {})["max_gen_toks"]
                if longest >= length:
                    full = f"{name} writes up to {longest} tokens, and the model sees {length} with the question"
                    raise ValueError(f"--eval-tasks: {full}; set max_gen_toks in the task's generation_kwargs")
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=FEWSHOT_SEED)

    def evaluate(self, model: ShardedLM) -> dict[str, float]:
        """Return {"tasks/NAME/METRIC": score}, equal on all ranks. Collective."""
        # The harness returns results to local rank 0 alone.
        results = evaluate(model, self._loaded, limit=self._limit, bootstrap_iters=0, log_samples=False)
        results = gather_objects(results)[0] if dist.is_initialized() else results
        scores = {}
        for task, values in results["results"].items():
            for name, value in values.items():
                metric, _, answers = name.partition(",")  # "acc,none": all answers, or those that a filter takes
                if answers and isinstance(value, (int, float)) and not metric.endswith("_stderr"):
                    scores[f"tasks/{task}/{metric}" + ("" if answers == "none" else f"-{answers}")] = float(value)
        return scores


class EvaluationStopped(Exception):  # noqa: N818 - not an error
    """The run was asked to stop."""


class ShardedLM(TemplateLM):
    """A causal language model that all ranks hold together, or each alone.

    logits: tokens int64 [B, S] -> logits [B, S, V], such as a sharded model; all ranks call it equally often.
    tokenizer: as ``build_tokenizer`` returns it. vocab_size: logits that count; default one per id of the tokenizer.
    length: tokens that the model sees; longer texts lose their beginning.
    stop: asked before each batch, on all ranks together; if it says yes, EvaluationStopped is raised.
    """

    def __init__(
        self,
        logits: Callable[[Tensor], Tensor],
        tokenizer: Tokenizer,
        *,
        length: int,
        batch_size: int,
        vocab_size: int | None = None,
        device: torch.device | str = "cpu",
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._logits, self._tokenizer, self._length, self._batch_size = logits, tokenizer, length, batch_size
        self._vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self._device, self._stop = torch.device(device), stop
        # The harness itself sees one rank: all of them build all requests, so they agree on who answers which.
        self._rank, self._world_size = 0, 1
        self._this, self._ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: BOS, as of HFLM."""
        bos = self._tokenizer.special.bos
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if add_special_tokens is None:  # a text that a chat template wrote may begin with BOS already
            begins = self._tokenizer.detokenize([self.prefix_token_id])
            add_special_tokens = not (begins and string.startswith(begins))
        return self._tokenizer.tokenize(string, add_special_tokens)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return scores

    def _loglikelihood_tokens(self, requests: list[Scored], **kwargs: Any) -> list[tuple[float, bool]]:
        if (longest := max(len(continuation) for _, _, continuation in requests)) > self._length:
            raise ValueError(f"--eval-tasks: an answer has {longest} tokens, and the model sees {self._length} at once")
        return self._on_all_ranks(requests, self._score, lambda request: len(request[1]) + len(request[2]))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        windows = []  # over all texts; each window is predicted whole, from at least one token before it
        for number, request in enumerate(requests):
            tokens = self.tok_encode(*request.args)
            for pair in get_rolling_token_windows(tokens, self.prefix_token_id, self._length, context_len=1):
                windows.append((number, *make_disjoint_window(pair)))
        sums = [0.0] * len(requests)
        for (number, *_), (score, _) in zip(windows, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += score
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Write the likeliest tokens. Raises ValueError for a task that draws them."""
        asked = [(request.args[0], normalize_gen_kwargs(request.args[1])) for request in requests]
        if any(options["do_sample"] for _, options in asked):
            raise ValueError("--eval-tasks: a task draws its answers; set do_sample: false in its generation_kwargs")
        return self._on_all_ranks(asked, self._write, lambda request: len(request[0]))

    def _on_all_ranks(
        self,
        requests: Sequence[Request],
        answer: Callable[[list[Request]], list[Answer]],
        size: Callable[[Request], int],
    ) -> list[Answer]:
        """Have each rank answer its part of ``requests``, in batches of similar ``size``, and return all answers."""
        order = sorted(range(len(requests)), key=lambda i: -size(requests[i]))
        mine = order[self._this :: self._ranks]
        answers: dict[int, Answer] = {}
        for number in range(math.ceil(len(order) / self._ranks / self._batch_size)):
            if self._stop():
                raise EvaluationStopped
            # A rank without requests answers one again: passes may gather weights from it.
            batch = mine[number * self._batch_size :][: self._batch_size] or order[:1]
            answers.update(zip(batch, answer([requests[i] for i in batch]), strict=True))
        for others in gather_objects(answers) if self._ranks > 1 else ():
            answers.update(others)
        return [answers[i] for i in range(len(requests))]

    @torch.no_grad()
    def _score(self, batch: list[Scored]) -> list[tuple[float, bool]]:
        """Return each continuation's log-probability, and whether its tokens are the likeliest ones."""
        texts = [(context + continuation)[-self._length - 1 :] for _, context, continuation in batch]
        logits = self._logits(self._padded([text[:-1] for text in texts]))  # [B, S, V]
        scores = []
        for row, text, (_, _, continuation) in zip(logits, texts, batch, strict=True):
            targets = torch.tensor(continuation, device=row.device)  # [T]
            row = row[: len(text) - 1, : self._vocab_size][-len(targets) :].float()  # [T, V]
            log_probabilities = row.log_softmax(-1).gather(-1, targets.unsqueeze(-1))
            scores.append((log_probabilities.sum().item(), bool((row.argmax(-1) == targets).all())))
        return scores

    @torch.no_grad()
    def _write(self, batch: list[tuple[str, Any]]) -> list[str]:
        """Continue each text up to one of its ``until``, without this and special tokens, which may be such an end."""
        longest = [options["max_gen_toks"] for _, options in batch]
        prompts = [
            (self.tok_encode(text) or [self.prefix_token_id])[number - self._length :]
            for (text, _), number in zip(batch, longest, strict=True)
        ]
        written: list[list[int]] = [[] for _ in batch]
        answers, done = [""] * len(batch), [False] * len(batch)
        special = {self.eot_token_id, *self._tokenizer.special.ids}
        while not self._all_ranks(all(done)):
            texts = [prompt + ids for prompt, ids in zip(prompts, written, strict=True)]
            logits = self._logits(self._padded(texts))[..., : self._vocab_size]
            for i in [i for i in range(len(batch)) if not done[i]]:
                written[i].append(int(logits[i, len(texts[i]) - 1].argmax()))
                until = [stop for stop in batch[i][1]["until"] if stop]
                spelled = self._tokenizer.detokenize([token for token in written[i] if token != self.eot_token_id])
                answer = self._tokenizer.detokenize([token for token in written[i] if token not in special])
                answers[i] = answer[: min((answer.index(stop) for stop in until if stop in answer), default=None)]
                is_stopped = any(stop in spelled for stop in until)
                done[i] = is_stopped or written[i][-1] == self.eot_token_id or len(written[i]) == longest[i]
        return answers

    def _padded(self, texts: list[list[int]]) -> Tensor:
        """Pad on the right, where nothing before it attends to it -> int64 [B, S]."""
        longest = max(map(len, texts))
        rows = [text + [self.eot_token_id] * (longest - len(text)) for text in texts]
        return torch.tensor(rows, device=self._device)

    def _all_ranks(self, mine: bool) -> bool:
        """Return whether all ranks say so. Collective."""
        if self._ranks == 1:
            return mine
        waiting = torch.tensor(float(not mine), device=self._device)
        dist.all_reduce(waiting)
        return waiting.item() == 0
