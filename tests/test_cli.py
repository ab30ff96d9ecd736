"""The command line: flags, exit statuses, what goes to which stream. The engine is a fake."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from flowkv_jax import cli
from flowkv_jax.cluster.dispatch_events import SequenceRecord
from flowkv_jax.commands import Context, options
from flowkv_jax.commands.generate import Figures
from flowkv_jax.config import DEFAULT_MODEL, EngineConfig, ServeConfig, flat_fields
from flowkv_jax.errors import EngineDeadError, ValidationError
from flowkv_jax.load import ModelInfo
from flowkv_jax.outputs import CompletionOutput, RequestMetrics, RequestOutput
from flowkv_jax.sampling_params import SamplingParams
from tests.tiny_models import write_tiny_model

WORDS = ("Paris", " is", " the", " capital")
INFO = ModelInfo(
    model="fake",
    served_model_name="fake",
    architecture="llama",
    dtype="float32",
    max_model_len=64,
    vocab_size=100,
    eos_token_ids=(2,),
    num_layers=1,
    num_kv_heads=1,
    head_dim=4,
    block_size=4,
    num_blocks=32,
    has_chat_template=True,
)


class FakeEngine:
    """Answers every prompt with `WORDS`, one a step, and remembers what it was asked."""

    def __init__(self, *, fail_with: BaseException | None = None, fail_at: int = 0) -> None:
        self.fail_with = fail_with
        self.fail_at = fail_at
        self.config: EngineConfig | None = None
        self.asked: list[Any] = []
        self.params: list[SamplingParams] = []
        self.num_closed_streams = 0
        self.num_cache_resets = 0
        self.is_shut_down = False

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.is_shut_down = True

    @property
    def cluster(self) -> FakeEngine:
        return self

    def records(self, limit: int) -> list[SequenceRecord]:
        """What became of its requests: they stayed where they were."""
        return []

    def model_info(self) -> ModelInfo:
        return INFO

    def reset_prefix_cache(self) -> bool:
        self.num_cache_resets += 1
        return True

    def generate(
        self, prompts: Any, params: SamplingParams, *, stream: bool = False
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        self.asked.append(prompts)
        self.params.append(params)
        if stream:
            return self._stream(params)
        return [list(self._stream(params))[-1]]

    def chat(
        self, messages: Sequence[Any], params: SamplingParams, *, stream: bool = False
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        return self.generate([dict(m) for m in messages], params, stream=stream)

    def _stream(self, params: SamplingParams) -> Iterator[RequestOutput]:
        try:
            for end in range(1, len(WORDS) + 1):
                if self.fail_with is not None and end > self.fail_at:
                    raise self.fail_with
                yield self._output(params, end)
        finally:
            self.num_closed_streams += 1

    def _output(self, params: SamplingParams, end: int) -> RequestOutput:
        finished = end == len(WORDS)
        answer = CompletionOutput(
            index=0,
            text="".join(WORDS[:end]),
            token_ids=list(range(end)),
            delta_text=WORDS[end - 1],
            delta_token_ids=[end - 1],
            finish_reason="length" if finished else None,
        )
        metrics = RequestMetrics(10.0, 10.0, 10.0, first_token_ts=10.5, last_token_ts=11.0)
        return RequestOutput(
            request_id="r",
            prompt=None,
            prompt_token_ids=[5] * 7,
            outputs=[dataclasses.replace(answer, index=index) for index in range(params.n)],
            finished=finished,
            metrics=metrics,
        )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@dataclasses.dataclass
class Outcome:
    status: int
    stdout: str
    stderr: str
    engine: FakeEngine


def run(*argv: str, stdin: str = "", engine: FakeEngine | None = None) -> Outcome:
    engine = engine or FakeEngine()
    stdout, stderr = io.StringIO(), io.StringIO()

    def factory(config: EngineConfig) -> Any:
        engine.config = config
        return engine

    context = Context(io.StringIO(stdin), stdout, stderr, factory, lambda *_: Path("nowhere"))
    status = cli.main(argv, context)
    return Outcome(status, stdout.getvalue(), stderr.getvalue(), engine)


def config_of(outcome: Outcome) -> EngineConfig:
    assert outcome.engine.config is not None
    return outcome.engine.config


class TestTop:
    @pytest.mark.parametrize(
        "argv", [["--help"], ["generate", "--help"], ["serve", "--help"], ["bench", "--help"]]
    )
    def test_help_imports_no_jax(self, argv: list[str]) -> None:
        script = (
            "import sys\n"
            "from flowkv_jax import cli\n"
            "try:\n    cli.main(sys.argv[1:])\n"
            "except SystemExit as stop:\n    assert stop.code == 0, stop.code\n"
            "heavy = {'jax', 'jaxlib', 'flax', 'grpc', 'rich'} & set(sys.modules)\n"
            "assert not heavy, heavy\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, *argv], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("usage: flowkv")

    def test_no_command_prints_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([]) == 2
        assert "commands:" in capsys.readouterr().err

    def test_unknown_command_suggests(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stop:
            cli.main(["generat"])
        assert stop.value.code == 2
        assert "did you mean 'generate'?" in capsys.readouterr().err

    def test_abbreviated_flags_are_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            run("generate", "--max-tok", "3", "hello")
        assert "--max-tok" in capsys.readouterr().err


class TestErrors:
    def test_client_error_is_one_line_and_status_2(self) -> None:
        outcome = run("generate", "x", engine=FakeEngine(fail_with=ValidationError("too long")))
        assert outcome.status == 2
        assert outcome.stderr == "flowkv generate: error: too long\n"
        assert outcome.engine.is_shut_down

    def test_server_error_is_status_1(self) -> None:
        outcome = run("generate", "x", engine=FakeEngine(fail_with=EngineDeadError("gone")))
        assert outcome.status == 1
        assert outcome.stderr == "flowkv generate: error: gone\n"

    def test_interrupt_is_status_130_without_a_word(self) -> None:
        outcome = run("generate", "x", engine=FakeEngine(fail_with=KeyboardInterrupt(), fail_at=2))
        assert outcome.status == 130
        assert outcome.stdout == "Paris is"
        assert outcome.stderr == ""
        assert outcome.engine.is_shut_down

    def test_broken_pipe_is_silent(self) -> None:
        outcome = run("generate", "x", engine=FakeEngine(fail_with=BrokenPipeError()))
        assert (outcome.status, outcome.stderr) == (141, "")

    def test_broken_pipe_in_a_real_process(self) -> None:
        script = (
            "import sys\n"
            "from flowkv_jax import cli\n"
            "from flowkv_jax.commands import pull\n"
            "def flood(args, context):\n"
            "    while True:\n        print('x' * 1000, file=context.stdout)\n"
            "pull.run = flood\n"
            "sys.exit(cli.main(['pull']))\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None and process.stderr is not None
        with process, process.stdout, process.stderr:
            process.stdout.read(10)
            process.stdout.close()
            stderr = process.stderr.read()
            assert process.wait(timeout=60) == 141
        assert stderr == b""

    def test_bug_keeps_its_traceback(self) -> None:
        with pytest.raises(ZeroDivisionError):
            run("generate", "x", engine=FakeEngine(fail_with=ZeroDivisionError()))


class TestFlags:
    @pytest.mark.parametrize("config_type", [EngineConfig, ServeConfig])
    def test_every_field_is_described(self, config_type: type[EngineConfig]) -> None:
        for name, (path, _) in flat_fields(config_type).items():
            section: Any = config_type
            for part in path:
                section = flat_fields.__globals__["get_type_hints"](section)[part]
            assert options.field_help(section).get(name), f"{section.__name__}.{name}"

    @pytest.mark.parametrize("indent", ["", "    "])
    def test_descriptions_come_from_either_form_of_docstring(self, indent: str) -> None:
        """Python 3.13 stores docstrings without their indentation, older versions with it."""

        class Owner: ...

        lines = ["Attributes:", "    host, port: where to", "        listen.", "    key: a secret."]
        Owner.__doc__ = f"Title.\n\n{indent}" + f"\n{indent}".join(
            [*lines, "", "Other:", "    x: 1"]
        )
        where = "where to listen."
        assert options.field_help(Owner) == {"host": where, "port": where, "key": "a secret."}

    def test_every_sampling_field_is_described(self) -> None:
        texts = options.field_help(SamplingParams)
        assert {item.name for item in dataclasses.fields(SamplingParams)} <= set(texts)

    def test_flags_reach_the_configuration(self) -> None:
        outcome = run(
            *("generate", "x", "--max-num-seqs", "3", "--dtype", "bfloat16", "-tp", "2"),
            *("--no-enable-prefix-caching", "--kv-cache-memory-bytes", "1.5GB"),
            *("--request-timeout-s", "none", "-m", "somewhere"),
        )
        assert outcome.status == 0, outcome.stderr
        config = config_of(outcome)
        assert config.scheduler.max_num_seqs == 3
        assert config.model.dtype == "bfloat16"
        assert config.model.model == "somewhere"
        assert config.runtime.tensor_parallel_size == 2
        assert config.cache.enable_prefix_caching is False
        assert config.cache.kv_cache_memory_bytes == 1_500_000_000
        assert config.scheduler.request_timeout_s is None

    def test_flags_win_over_the_file(self, tmp_path: Path) -> None:
        file = tmp_path / "c.yaml"
        file.write_text("max_num_seqs: 5\nscheduler: {max_num_batched_tokens: 64}\n")
        outcome = run("generate", "x", "--config", str(file), "--max-num-seqs", "6")
        scheduler = config_of(outcome).scheduler
        assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (6, 64)

    def test_unknown_key_names_key_and_file(self, tmp_path: Path) -> None:
        file = tmp_path / "c.yaml"
        file.write_text("max_num_seq: 5\n")
        outcome = run("generate", "x", "--config", str(file))
        assert outcome.status == 2
        assert str(file) in outcome.stderr and "'max_num_seq'" in outcome.stderr
        assert outcome.engine.config is None

    def test_one_command_needs_no_server_sized_pool(self) -> None:
        assert config_of(run("generate", "x")).scheduler.max_num_seqs == 4
        many = run("generate", "x", "--n", "9", "--temperature", "1")
        assert config_of(many).scheduler.max_num_seqs == 9

    def test_sampling_flags(self) -> None:
        outcome = run(
            *("generate", "x", "--max-tokens", "9", "--temperature", "0.5", "--top-p", "0.9"),
            *("--top-k", "7", "--seed", "11", "--stop", "a", "--stop", "b", "--ignore-eos"),
            *("--stop-token-ids", "3"),
        )
        assert outcome.engine.params == [
            SamplingParams(
                max_tokens=9,
                temperature=0.5,
                top_p=0.9,
                top_k=7,
                seed=11,
                stop=["a", "b"],
                ignore_eos=True,
                stop_token_ids=[3],
            )
        ]
        assert config_of(outcome).model.seed == 0

    def test_sampling_value_out_of_range(self) -> None:
        outcome = run("generate", "x", "--temperature", "-1")
        assert outcome.status == 2
        assert "temperature" in outcome.stderr
        assert outcome.engine.config is None

    @pytest.mark.parametrize(
        ("text", "num_bytes"),
        [("0", 0), ("4096", 4096), ("1KiB", 1024), ("2 GiB", 2 << 30), ("1.5MB", 1_500_000)],
    )
    def test_sizes(self, text: str, num_bytes: int) -> None:
        assert options.parse_bytes(text) == num_bytes

    @pytest.mark.parametrize("text", ["", "-1", "1k", "1G", "GiB", "1e9", "nan"])
    def test_sizes_that_are_none(self, text: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            run("generate", "x", f"--swap-space-bytes={text}")
        assert "no size" in capsys.readouterr().err


class TestGenerate:
    def test_text_and_table(self) -> None:
        outcome = run("generate", "The capital")
        assert outcome.status == 0
        assert outcome.stdout == "Paris is the capital\n"
        for shown in ("TTFT ms", "500.0", "TPOT ms", "166.7", "4.0", "3 of 32"):
            assert shown in outcome.stderr
        assert outcome.engine.asked == ["The capital"]
        assert outcome.engine.params[0].max_tokens == 128
        assert outcome.engine.is_shut_down

    def test_quiet(self) -> None:
        outcome = run("generate", "x", "--quiet")
        assert (outcome.stdout, outcome.stderr) == ("Paris is the capital\n", "")

    def test_json(self) -> None:
        outcome = run("generate", "x", "--json")
        document = json.loads(outcome.stdout)
        assert outcome.stderr == ""
        assert document["output"]["outputs"][0]["text"] == "Paris is the capital"
        assert document["figures"]["ttft_ms"] == 500.0
        assert document["model"] == "fake"

    @pytest.mark.parametrize("argv", [["-"], []])
    def test_prompt_from_a_pipe(self, argv: list[str]) -> None:
        assert run("generate", *argv, stdin="a\nb\n").engine.asked == ["a\nb"]

    def test_no_prompt_at_a_terminal(self) -> None:
        context = Context(Terminal(), io.StringIO(), io.StringIO())
        assert cli.main(["generate"], context) == 2
        assert isinstance(context.stderr, io.StringIO)
        assert "no prompt" in context.stderr.getvalue()

    def test_chat_style(self) -> None:
        outcome = run("generate", "--chat", "--system", "Be brief.", "Hello")
        assert outcome.engine.asked == [
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hello"},
            ]
        ]

    def test_system_without_chat(self) -> None:
        assert run("generate", "--system", "s", "x").status == 2

    def test_warm_up_is_not_shown_and_leaves_no_cache(self) -> None:
        outcome = run("generate", "--warmup", "x", "--min-tokens", "3")
        assert outcome.stdout == "Paris is the capital\n"
        assert [p.max_tokens for p in outcome.engine.params] == [2, 128]
        assert outcome.engine.num_cache_resets == 1

    def test_several_answers(self) -> None:
        outcome = run("generate", "x", "--n", "2", "--temperature", "1", "-q")
        assert outcome.stdout == (
            "--- 1 of 2\nParis is the capital\n--- 2 of 2\nParis is the capital\n"
        )

    def test_blocks_are_shared_up_to_the_last_full_one(self) -> None:
        output = FakeEngine()._output(SamplingParams(n=2, temperature=1.0), len(WORDS))
        # 7 prompt tokens in blocks of 4: one full block is shared; each answer holds 3 + 3 more.
        assert Figures.of(output, 4, 32).kv_blocks == 1 + 2 * 2


class TestChat:
    def test_history_grows_and_resets(self) -> None:
        outcome = run("chat", "--system", "s", stdin="one\ntwo\n/reset\nthree\n/exit\nfour\n")
        assert outcome.status == 0
        system = {"role": "system", "content": "s"}
        answer = {"role": "assistant", "content": "Paris is the capital"}
        first, second, third = ({"role": "user", "content": c} for c in ("one", "two", "three"))
        assert outcome.engine.asked == [
            [system, first],
            [system, first, answer, second],
            [system, third],
        ]
        assert outcome.stdout == "Paris is the capital\n" * 3

    def test_interrupt_stops_the_answer_only(self) -> None:
        engine = FakeEngine(fail_with=KeyboardInterrupt(), fail_at=2)
        outcome = run("chat", stdin="one\ntwo\n", engine=engine)
        assert outcome.status == 0
        assert outcome.stdout == "Paris is\nParis is\n"
        assert outcome.stderr.count("[stopped]") == 2
        assert engine.asked[1][1] == {"role": "assistant", "content": "Paris is"}
        assert engine.num_closed_streams == 2

    def test_interrupt_at_the_prompt_leaves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(prompt: str) -> str:
            raise KeyboardInterrupt

        monkeypatch.setattr("builtins.input", interrupted)
        engine = FakeEngine()
        context = Context(
            Terminal(), io.StringIO(), io.StringIO(), lambda config: engine, lambda *_: Path()
        )
        assert cli.main(["chat"], context) == 0
        assert engine.is_shut_down

    def test_failed_message_is_not_kept(self) -> None:
        engine = FakeEngine(fail_with=ValidationError("too long"))
        outcome = run("chat", stdin="one\ntwo\n", engine=engine)
        assert outcome.status == 2
        assert outcome.stderr.count("error: too long") == 2
        assert engine.asked[1] == [{"role": "user", "content": "two"}]

    def test_unknown_command_is_not_a_message(self) -> None:
        outcome = run("chat", stdin="/rest\n/help\n")
        assert outcome.engine.asked == []
        assert "/rest: unknown command" in outcome.stderr and "/reset" in outcome.stderr


class TestServe:
    def test_configuration_reaches_the_server(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import flowkv_jax.commands.serve as serve

        seen: list[ServeConfig] = []

        def run_serve(config: ServeConfig, engine_factory: Any, *, out: Any) -> int:
            seen.append(config)
            return 0

        monkeypatch.setattr(serve, "run_serve", run_serve)
        assert run("serve", "--port", "0", "--grpc-port", "0", "--max-num-seqs", "2").status == 0
        assert seen[0].server.grpc_port == 0
        assert seen[0].engine.scheduler.max_num_seqs == 2
        assert run("serve", "--port", "0", "some.gguf").status == 0
        assert seen[1].engine.model.model == "some.gguf"

    @pytest.mark.parametrize(
        ("flags", "named"),
        [
            (["--prefill-nodes", "1", "--decode-nodes", "1"], "give workers=none"),
            (["--kv-host", "192.0.2.1"], "cluster_secret_file or FLOWKV_CLUSTER_SECRET"),
            (["--no-enable-prefix-caching"], "needs enable_prefix_caching"),
            (["--kv-host", "0.0.0.0"], "kv_host"),
        ],
    )
    def test_part_in_hand_offs_between_servers_that_cannot_be(
        self, monkeypatch: pytest.MonkeyPatch, flags: list[str], named: str
    ) -> None:
        monkeypatch.delenv("FLOWKV_CLUSTER_SECRET", raising=False)
        outcome = run("serve", "--port", "0", "--grpc-port", "0", "--kv-role", "kv_both", *flags)
        assert outcome.status == 2
        assert named in outcome.stderr


class TestPull:
    def test_prints_the_path(self, tmp_path: Path) -> None:
        file = tmp_path / "model.gguf"
        file.write_bytes(b"12345")
        stdout, stderr = io.StringIO(), io.StringIO()

        def fetch(name: str, progress: Any) -> Path:
            progress(0, 5, "downloading")
            progress(5, 5, "downloading")
            return file

        context = Context(io.StringIO(), stdout, stderr, fetch_model=fetch)
        assert cli.main(["pull", "some-model"], context) == 0
        assert stdout.getvalue() == f"{file}\n"
        assert stderr.getvalue() == "downloading some-model\n"

    def test_json(self, tmp_path: Path) -> None:
        file = tmp_path / "model.gguf"
        file.write_bytes(b"12345")
        stdout = io.StringIO()
        context = Context(io.StringIO(), stdout, io.StringIO(), fetch_model=lambda *_: file)
        assert cli.main(["pull", "m", "--json", "-q"], context) == 0
        assert json.loads(stdout.getvalue()) == {"name": "m", "path": str(file), "size_bytes": 5}

    def test_list_has_the_default_model(self) -> None:
        outcome = run("pull", "--list", "--json")
        assert DEFAULT_MODEL in [model["name"] for model in json.loads(outcome.stdout)]
        assert DEFAULT_MODEL in run("pull", "--list").stdout


class TestProgress:
    def test_terminal_gets_a_bar_and_a_spinner(self) -> None:
        from flowkv_jax.commands.progress import pull_bar, spinner

        terminal = Terminal()
        with spinner(terminal, "Loading"):
            pass
        with pull_bar(terminal, "some-model") as report:
            report(0, None, "downloading")
            report(3, 10, "downloading")
        assert "Loading" in terminal.getvalue() and "downloading some-model" in terminal.getvalue()

    def test_disabled_is_silent(self) -> None:
        from flowkv_jax.commands.progress import pull_bar, spinner

        terminal = Terminal()
        with (
            spinner(terminal, "Loading", enabled=False),
            pull_bar(terminal, "some-model", enabled=False) as report,
        ):
            report(0, 1, "fetching")
        assert terminal.getvalue() == ""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "gqa_tied"))


class TestEndToEnd:
    """The real engine over a tiny random model."""

    @pytest.fixture(autouse=True)
    def keep_programs(self, xla_cache: Path) -> None:
        # A setting of the whole process: the same in every test.
        self.settings = ("--compilation-cache-dir", str(xla_cache), "--num-blocks", "64")

    def run(self, *argv: str, stdin: str = "") -> tuple[int, str, str]:
        stdout, stderr = io.StringIO(), io.StringIO()
        argv = (*argv, *self.settings)
        status = cli.main(argv, Context(io.StringIO(stdin), stdout, stderr))
        return status, stdout.getvalue(), stderr.getvalue()

    def test_generate_streams_what_json_returns(self, model: str) -> None:
        arguments = ("generate", "the sea", "-m", model, "--max-tokens", "8", "--ignore-eos")
        status, text, stderr = self.run(*arguments)
        assert status == 0, stderr
        assert "KV blocks used" in stderr
        status, document, stderr = self.run(*arguments, "--json")
        assert (status, stderr) == (0, "")
        output = json.loads(document)["output"]
        assert output["finished"] and len(output["outputs"][0]["token_ids"]) == 8
        assert output["outputs"][0]["text"] + "\n" == text
        assert json.loads(document)["figures"]["tpot_ms"] > 0

    def test_chat(self, model: str) -> None:
        arguments = ("chat", "-m", model, "--max-tokens", "4", "--ignore-eos", "-q")
        status, text, stderr = self.run(*arguments, stdin="hello\n/reset\nhello\n")
        assert (status, stderr) == (0, "The conversation starts over.\n")
        first, second = text[: len(text) // 2], text[len(text) // 2 :]
        assert first == second

    def test_missing_model(self, tmp_path: Path) -> None:
        status, text, stderr = self.run("generate", "x", "-m", str(tmp_path / "nowhere"))
        assert (status, text) == (2, "")
        assert stderr.startswith("flowkv generate: error: ") and stderr.count("\n") == 1

    def test_prompt_over_the_limit(self, model: str) -> None:
        status, _, stderr = self.run("generate", "a " * 300, "-m", model, "--max-model-len", "64")
        assert status == 2
        assert "301 tokens" in stderr and stderr.count("\n") == 1
