"""A peer's process that gives scores: scores.py PEER FOLDER FORM THREADS, run by the interpreter that has the peer.

Brings the checkpoint into the form at the first use, and writes what it is as one line of JSON. Then each line
{"tokens": [...], "first": n} is answered with the scores of what follows each token from number n on, [T, V] in float32.
Imports nothing of Attend's.
"""

import ctypes
import json
import os
import signal
import sys

from child import DIE_WITH_PARENT, FOLDER, adapter

WEIGHTS = {
    "float32": ["--weight-format", "fp32"],
    "int8": ["--weight-format", "int8"],
    "int4, groups of 128": ["--weight-format", "int4"],
    "int4, groups of 32": ["--weight-format", "int4", "--group-size", "32"],
}
"""Flags of optimum-cli. Groups of 128 are its own choice; with either, the embedding and the head have 8 bits."""


def llamacpp(folder, form, threads):
    """Facts, and (tokens, first) -> scores."""
    import llama_cpp
    import numpy

    ours = adapter("llamacpp")
    path = ours.file_of(folder, form, threads)
    model = ours.Context(path, threads)

    def read(tokens, first):
        model.c.llama_memory_clear(model.memory, True)
        batch, model.batch.n_tokens = model.batch, len(tokens)
        for at, token in enumerate(tokens):
            batch.token[at], batch.pos[at], batch.logits[at] = token, at, at >= first
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
        assert model.c.llama_decode(model.context, batch) == 0
        return numpy.ctypeslib.as_array(model.c.llama_get_logits(model.context), (len(tokens) - first, model.vocab_size))

    facts = {"vocab_size": model.vocab_size, "version": llama_cpp.__version__, "bytes": os.path.getsize(path)}
    return facts, read


def openvino(folder, form, threads):
    """Facts, and (tokens, first) -> scores."""
    import numpy
    import openvino

    exported = os.path.join(folder, "openvino " + form)
    if not os.path.isdir(exported):
        adapter("openvino").export(folder, exported, WEIGHTS[form])
    # keys and values are not what is compared
    options = {"INFERENCE_NUM_THREADS": threads, "KV_CACHE_PRECISION": "f16"}
    compiled = openvino.Core().compile_model(os.path.join(exported, "openvino_model.xml"), "CPU", options)
    request = compiled.create_infer_request()

    def read(tokens, first):
        request.reset_state()
        size = len(tokens)
        rows = {"input_ids": tokens, "attention_mask": [1] * size, "position_ids": range(size)}
        inputs = {name: numpy.array([list(row)], dtype=numpy.int64) for name, row in rows.items()}
        found = request.infer(inputs | {"beam_idx": numpy.zeros(1, dtype=numpy.int32)})
        return found["logits"][0, first:]

    names = ("INFERENCE_PRECISION_HINT", "DYNAMIC_QUANTIZATION_GROUP_SIZE", "KV_CACHE_PRECISION")
    facts = {"version": openvino.__version__, **{name: str(compiled.get_property(name)) for name in names}}
    facts["bytes"] = os.path.getsize(os.path.join(exported, "openvino_model.bin"))
    return facts | {"vocab_size": read([0], 0).shape[-1]}, read


def main():
    """Answer until standard input ends. What libraries print goes to standard error. Ends with the process that started it."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.path[:] = [path for path in sys.path if path != FOLDER]
    import numpy

    peer, folder, form, threads = sys.argv[1:]
    facts, read = {"llamacpp": llamacpp, "openvino": openvino}[peer](folder, form, int(threads))
    answers.write(json.dumps(facts).encode() + b"\n")
    answers.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        answers.write(numpy.ascontiguousarray(read(asked["tokens"], asked["first"]), dtype=numpy.float32).data)
        answers.flush()


if __name__ == "__main__":
    main()
