"""Every route of HTTP, and the methods of gRPC that ask for the same. Serving, metrics, HAProxy and documents read this."""

from dataclasses import dataclass

SERVICE = "attend.v1.GenerationService"
"""The name of the one service of gRPC."""


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path, and its methods of gRPC."""

    method: str
    path: str
    tag: str
    summary: str
    about: str
    """What service/API.md says of it."""
    rpcs: tuple[str, ...] = ()
    is_counted: bool = False
    """True if each of its calls counts in attend_requests_total: those that compute."""
    is_queued: bool = False
    """True if its calls wait in the engine's queue: where that is full, HAProxy refuses them."""

    @property
    def documented_path(self) -> str:
        """The path as documents write it."""
        return self.path.replace(":path}", "}")


COMPLETIONS = Route(
    *("POST", "/v1/completions", "generation", "Continue a prompt"),
    "OpenAI completions, streamed as server-sent events when `stream` is true",
    ("Generate", "GenerateStream"),
    is_counted=True,
    is_queued=True,
)
CHAT = Route(
    *("POST", "/v1/chat/completions", "generation", "Continue a conversation"),
    "chat through the checkpoint's chat template, with [tools and reasoning](#tools-and-reasoning)",
    ("Chat", "ChatStream"),
    is_counted=True,
    is_queued=True,
)
RESPONSES = Route(
    *("POST", "/v1/responses", "generation", "Answer a conversation, in OpenAI's newer API"),
    "OpenAI's Responses, stateless: [what is taken](#responses)",
    is_counted=True,
    is_queued=True,
)
MESSAGES = Route(
    *("POST", "/v1/messages", "generation", "Answer a conversation, in Anthropic's API"),
    "Anthropic's messages: [what is taken](#messages)",
    is_counted=True,
    is_queued=True,
)
COUNT_TOKENS = Route(
    *("POST", "/v1/messages/count_tokens", "tokens", "Tokens of a conversation, in Anthropic's API"),
    "how many tokens the prompt of such a call has",
)
ATTENTION = Route(
    *("POST", "/v1/attention", "attention", "What the model does with a text"),
    "attention weights and log probabilities of a text, logit lens of each layer: [fields](#attention)",
    ("Explain",),
    is_counted=True,
)
EMBEDDINGS = Route(
    *("POST", "/v1/embeddings", "embeddings", "Texts as vectors"),
    "texts as vectors, in OpenAI's shape, where the checkpoint says how: [fields](#embeddings)",
    ("Embed",),
    is_counted=True,
    is_queued=True,
)
RERANK = Route(
    *("POST", "/v1/rerank", "scores", "Documents by how well they answer a query"),
    "documents by relevance to a query, in the shape of Cohere, Jina and vLLM: [fields](#scores)",
    is_counted=True,
    is_queued=True,
)
SCORE = Route(
    *("POST", "/v1/score", "scores", "How well documents answer queries"),
    "a score for each pair of texts, in vLLM's shape: [fields](#scores)",
    is_counted=True,
    is_queued=True,
)
TOKENIZE = Route(*("POST", "/tokenize", "tokens", "Text to token ids"), "token ids of a text", ("Tokenize",))
DETOKENIZE = Route(*("POST", "/detokenize", "tokens", "Token ids to text"), "the text of token ids", ("Detokenize",))
TOKENIZER_INFO = Route(
    *("GET", "/tokenizer_info", "tokens", "The tokenizer"),
    "the special tokens and the chat template, as tokenizer_config.json has them",
)
UPLOAD = Route(
    *("POST", "/v1/files", "batches", "Upload a file for a batch"),
    "a form with `purpose=batch` and `file`: JSONL of requests, for a batch. On where `batch_folder` is set",
)
FILES = Route(*("GET", "/v1/files", "batches", "Files"), "the caller's files; `?purpose=`, `limit`, `order`, `after`")
FILE = Route(*("GET", "/v1/files/{file_id}", "batches", "One file"), "one of these")
FILE_CONTENT = Route(*("GET", "/v1/files/{file_id}/content", "batches", "The content of a file"), "the bytes of a file")
FILE_DELETE = Route(
    *("DELETE", "/v1/files/{file_id}", "batches", "Delete a file"),
    "delete a file that no unfinished batch reads",
)
BATCH_CREATE = Route(
    *("POST", "/v1/batches", "batches", "Have many requests computed later"),
    "OpenAI's batches: the lines of a file are computed when nobody else needs the engine",
)
BATCHES = Route(*("GET", "/v1/batches", "batches", "Batches"), "the caller's batches; `?limit=`, `after`")
BATCH = Route(*("GET", "/v1/batches/{batch_id}", "batches", "One batch"), "how far a batch is, and its files")
BATCH_CANCEL = Route(
    *("POST", "/v1/batches/{batch_id}/cancel", "batches", "Cancel a batch"),
    "compute no more lines of a batch; what is answered is kept",
)
MODELS = Route(
    *("GET", "/v1/models", "models", "The served models"),
    "the served models and LoRA adapters (with `parent`); `status` where there are [several](CHECKPOINTS.md#several-models)",
)
MODEL = Route(
    *("GET", "/v1/models/{model_id:path}", "models", "One served model"),
    "one of these; its name may have slashes",
)
CAPACITY = Route(
    *("GET", "/v1/capacity", "operations", "Capacity"),
    "free KV blocks, load, tokens/s of all replicas, and the estimated wait of a call",
)
HEALTHZ = Route(
    *("GET", "/healthz", "operations", "Liveness"),
    "liveness, also as `/health`. With HAProxy: it runs; with `single`: the step thread made progress within 10 s",
)
READYZ = Route(
    *("GET", "/readyz", "operations", "Readiness"),
    "readiness of the replica that answers: weights loaded, and not told to end",
)
METRICS = Route(
    *("GET", "/metrics", "operations", "Metrics"),
    "Prometheus text of all replicas, each sample with a `replica` label",
)
VERSION = Route(
    *("GET", "/version", "operations", "Version"),
    "version, model, device, dtype, weight format, backend ([why a slower one](OPERATION.md#the-slower-path)), fingerprint",
)
ROUTES = (
    *(COMPLETIONS, CHAT, RESPONSES, MESSAGES, COUNT_TOKENS, ATTENTION, EMBEDDINGS, RERANK, SCORE),
    *(TOKENIZE, DETOKENIZE, TOKENIZER_INFO),
    *(UPLOAD, FILES, FILE, FILE_CONTENT, FILE_DELETE, BATCH_CREATE, BATCHES, BATCH, BATCH_CANCEL),
    *(MODELS, MODEL, CAPACITY, HEALTHZ, READYZ, METRICS, VERSION),
)
OPEN = (HEALTHZ, READYZ, METRICS, VERSION)
"""Routes that need no key."""
LEAVING_HEADER = "x-attend-leaving"
"""Of the answer to READYZ of a replica that lingers: HAProxy then tells each caller to go elsewhere."""
PROBES = ("/healthz", "/health", "/readyz")
"""Paths that GET and HEAD find whatever the limits say."""
COUNTED = {
    "http": tuple(route.path for route in ROUTES if route.is_counted),
    "grpc": tuple(rpc for route in ROUTES if route.is_counted for rpc in route.rpcs),
}
"""By transport: the routes and methods whose calls count in attend_requests_total."""
TAGS = {
    "generation": "Text from the model.",
    "models": "What is served.",
    "attention": "What the model does with a text.",
    "embeddings": "Texts as vectors.",
    "scores": "How well documents answer queries.",
    "tokens": "Text and token ids.",
    "batches": "Many requests in a file, computed when nobody else needs the engine.",
    "operations": "For those who run the server.",
}
