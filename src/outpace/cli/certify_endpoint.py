"""``outpace certify --endpoint URL``: is a server's speculation lossless? Exit code 1 where a test refuses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from outpace.cli import options as opt
from outpace.cli.options import option
from outpace.cli.output import out, print_json
from outpace.core.errors import BadInput
from outpace.core.names import unknown

if TYPE_CHECKING:
    from outpace.certify.engine_certificate import EngineCertificate
    from outpace.certify.server_client import Server
    from outpace.cli.session import Drafting, Machine

ENGINE = "Engines"
ENGINES = ("vllm",)
_LONGEST = 64
_MOST_TESTED = 16
"""Of the longest drafts of engines that are started: further positions are reached by few answers."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """A server to certify, and what it is compared with."""

    endpoint: Annotated[
        str | None,
        option(
            value="URL", panel=ENGINE, text="Certify this OpenAI-compatible server's speculation; --model is its model."
        ),
    ] = None
    engine: Annotated[
        str | None,
        option(
            value="NAME",
            panel=ENGINE,
            text="Start this engine (vllm) with speculation and without, and certify it. METHOD, --head, --draft-model "
            "and --param as for serve.",
        ),
    ] = None
    vllm_python: Annotated[
        str | None,
        option(
            value="PATH",
            panel=ENGINE,
            text="Python interpreter that has vLLM. [dim]\\[default: that of make vllm, or the running one][/]",
        ),
    ] = None
    engine_arg: Annotated[
        list[str] | None,
        option(value="ARG", panel=ENGINE, text="Argument for both of --engine's servers as it is; may be repeated."),
    ] = None
    no_plugin: Annotated[
        bool, option("--no-plugin", panel=ENGINE, text="Start --engine as it is released, without outpace's plug-in.")
    ] = False
    baseline: Annotated[
        str | None,
        option(
            value="URL",
            panel=ENGINE,
            text="The same model without speculation. [dim]\\[default: outpace's own server without speculation; "
            "otherwise the endpoint's log-probabilities][/]",
        ),
    ] = None
    target_model: Annotated[
        str | None,
        option(value="NAME", panel=ENGINE, text="Compare with these weights, decoded here, instead of a baseline."),
    ] = None
    api_key_file: Annotated[
        Path | None, option(value="FILE", panel=ENGINE, text="File with the API key for endpoint and baseline.")
    ] = None
    draft_length: Annotated[
        int | None,
        option(
            value="K",
            panel=ENGINE,
            text="Longest draft of the server: tokens 2 to K+2 of answers are tested. "
            "[dim]\\[default: 6; with --engine its own, up to 16][/]",
        ),
    ] = None
    time_limit: Annotated[
        float, option(value="SECONDS", panel=ENGINE, text="Longest time that one request may take.")
    ] = 60.0

    @property
    def server(self) -> bool:
        """Whether a server is certified, and not a method of outpace."""
        return self.endpoint is not None or self.engine is not None

    def check(self, method: str | None) -> None:
        """Raise BadInput for a combination that means nothing."""
        of_endpoint = {
            "--baseline": self.baseline,
            "--target-model": self.target_model,
            "--api-key-file": self.api_key_file,
        }
        of_engine = {
            "--vllm-python": self.vllm_python,
            "--engine-arg": self.engine_arg,
            "--no-plugin": self.no_plugin or None,
        }
        if self.endpoint is None:
            _only(of_endpoint, "--endpoint URL, the server's address")
        if self.engine is None:
            _only(of_engine, "--engine vllm")
            if self.endpoint is None and method is None:
                raise BadInput("name a METHOD to certify (see: outpace methods), or a server: --endpoint URL")
            if self.endpoint is not None and method is not None:
                raise BadInput(f"give a METHOD or --endpoint, not both: the server has its own method, not '{method}'")
        elif self.endpoint is not None:
            raise BadInput("give --endpoint for a server that runs, or --engine to start one, not both")
        elif self.engine not in ENGINES:
            raise unknown("engine", self.engine, ENGINES)
        if self.baseline is not None and self.target_model is not None:
            raise BadInput("give --baseline or --target-model, not both")
        if self.draft_length is not None and not 1 <= self.draft_length <= _LONGEST:
            raise BadInput(f"--draft-length must be between 1 and {_LONGEST}, not {self.draft_length}")
        opt.check_time_limit(self.time_limit)

    @contextmanager
    def servers(
        self, method: str | None, machine: Machine, drafting: Drafting
    ) -> Iterator[tuple[Server, Server | None, int]]:
        """The server, its baseline, and the longest draft to test; those that were started end with the context."""
        from outpace.certify.engine_plan import DRAFT_LENGTH
        from outpace.certify.server_client import Server

        name, limit = machine.model, self.time_limit
        if self.engine is not None:
            from outpace.cli.certify_vllm import two_servers

            servers = two_servers(
                self.vllm_python, method, machine, drafting, self.engine_arg, plugin=not self.no_plugin
            )
            with servers as (mine, base, drafted):
                length = self.draft_length or min(drafted, _MOST_TESTED)
                yield Server(mine, name, None, limit), Server(base, name, None, limit, "the baseline"), length
            return
        assert self.endpoint is not None
        key = None if self.api_key_file is None else read_key(self.api_key_file)
        baseline = None if self.baseline is None else Server(self.baseline, name, key, limit, "the baseline")
        yield Server(self.endpoint, name, key, limit), baseline, self.draft_length or DRAFT_LENGTH


def _only(given: Mapping[str, object], with_: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise BadInput(f"{name} belongs to a server: add {with_}")


def read_key(path: Path) -> str:
    """The API key in a file. Raises BadInput for a file without one."""
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"cannot read --api-key-file {path}: {getattr(error, 'strerror', None) or 'it is no text'}"
        ) from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise BadInput(f"--api-key-file {path} must hold one API key, in one line, and nothing else")
    return key


def certify_endpoint(
    engine: EngineOptions,
    method: str | None,
    machine: Machine,
    drafting: Drafting,
    prompts: opt.PromptFile,
    sampling: opt.Sampling,
    samples: int,
    alpha: float,
    *,
    json: bool,
) -> EngineCertificate:
    """Certify the server and print what was found."""
    from outpace.certify.engine_plan import Plan
    from outpace.certify.engine_prompts import engine_prompts
    from outpace.certify.engines import certify_engine

    params = sampling.params() if sampling.temperature is not None else sampling.params(temperature=1.0)
    texts = [one.text for one in prompts.read_unconstrained("certify")]
    if prompts.prompts is None:
        texts = engine_prompts(texts)
    target = None
    if engine.target_model is not None:
        machine.check(engine.target_model)
        target = machine.load(engine.target_model)
    with engine.servers(method, machine, drafting) as (server, baseline, length):
        plan = Plan(texts, params, samples, length, alpha, sampling.seed)
        certificate = certify_engine(server, plan, baseline=baseline, target=target)
    if json:
        print_json(certificate.public())
    else:
        _show(certificate)
    return certificate


def _show(found: EngineCertificate) -> None:
    say = partial(out().print, soft_wrap=True)
    mark = {True: "[green]lossless[/]", False: "[bold red]not lossless[/]", None: "[yellow]not shown[/]"}
    say(f"[bold cyan]{found.model}[/] at {found.endpoint}  {mark[found.lossless]}  ({found.sampling})")
    say(f"  {found.verdict}", markup=False)
    say(f"  compared with: {found.reference}", style="dim", markup=False)
    if found.speculation is not None:
        counts = found.speculation
        say(f"  {counts['drafted']} tokens drafted, {counts['accepted']} accepted", style="dim")
    if found.logprobs is not None:
        kind = f"{found.logprobs['kind']}, the {found.logprobs['top']} most likely tokens"
        say(f"  log-probabilities: {kind}", style="dim")
    if found.numerics is not None:
        size = f"{found.numerics.bias:.2g} in {found.numerics.contexts} prefixes"
        say(f"  the baseline's own numerics: up to {size} (total variation)", style="dim")
    if found.detectable_bias is not None:
        finest = min(one.detectable_bias for one in found.checks if one.detectable_bias is not None)
        power = f"{finest:.2g} by the most sensitive test, of {found.detectable_bias:.2g} by every test"
        say(f"  detected with 90 % probability: a bias of {power}", style="dim")
    if found.first_difference is not None:
        say(f"  first difference: {found.first_difference}", style="dim", markup=False)
    for check in found.checks:
        if check.passed is False:
            size = "" if check.p_value is None else f", adjusted p = {check.p_value:.2g}"
            say(f"  refused: {check.name}{size}  {check.note}", style="red", markup=False)
    for remark in found.remarks:
        say(f"  {remark}", style="dim", markup=False)
