"""llama.cpp through its C interface; the checkpoint is converted to GGUF, of the type asked for, at the first use."""

import ctypes
import json
import os
import struct

SEQUENCES, BATCH, CONTEXT = 16, 2048, 8192
MATRICES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def tensors(path):
    """(name, bfloat16 values as uint16) of a safetensors file; numpy has no bfloat16."""
    import numpy

    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        data = numpy.memmap(path, numpy.uint8, "r", offset=8 + size)
    for name, about in header.items():
        if name != "__metadata__":
            assert about["dtype"] == "BF16", about
            begin, end = about["data_offsets"]
            yield name, data[begin:end].view(numpy.uint16).reshape(about["shape"])


def new_name(name):
    """The GGUF name of a Llama checkpoint's tensor."""
    outside = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in outside:
        return outside[name]
    _, _, layer, *inside, kind = name.split(".")
    return f"blk.{layer}.{MATRICES['.'.join(inside)]}.{kind}"


def interleaved(x, heads):
    """Rows of a query or key matrix as ggml rotates them: pairs are neighbours instead of halves."""
    return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def convert(folder, target):
    """Write the GGUF file of a Llama or Qwen3 checkpoint in bfloat16."""
    import gguf
    import numpy

    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    heads, kv_heads, hidden = config["num_attention_heads"], config["num_key_value_heads"], config["hidden_size"]
    out = gguf.GGUFWriter(target + ".part", config["model_type"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(hidden)
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    head = config.get("head_dim") or hidden // heads
    out.add_rope_dimension_count(head)
    out.add_key_length(head)
    out.add_value_length(head)
    out.add_rope_freq_base(config.get("rope_theta", 10000.0))
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_vocab_size(config["vocab_size"])
    out.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    out.add_tokenizer_model("no_vocab")
    for name, x in tensors(os.path.join(folder, "model.safetensors")):
        if config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            x = interleaved(x, heads if "q_proj" in name else kv_heads)
        if x.ndim == 1:
            out.add_tensor(new_name(name), (x.astype(numpy.uint32) << 16).view(numpy.float32))
        else:
            out.add_tensor(
                new_name(name), numpy.ascontiguousarray(x).view(numpy.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16
            )
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    os.rename(target + ".part", target)


def common(a, b):
    """How many tokens two lists begin with alike."""
    return next((at for at in range(min(len(a), len(b))) if a[at] != b[at]), min(len(a), len(b)))


class Context:
    """A loaded model with places for SEQUENCES prompts; with room for a context it keeps what prompts begin with."""

    def __init__(self, path, threads, context=0):
        import llama_cpp

        self.c = llama_cpp
        self.log = llama_cpp.llama_log_callback(lambda *_: None)  # kept: the library calls it for ever
        llama_cpp.llama_log_set(self.log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_seq_max, options.kv_unified = max(CONTEXT, context), BATCH, SEQUENCES, True
        self.keeps, self.held = context > 0, {}
        options.n_threads = options.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        assert self.context, "llama.cpp has no context for this model"
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def step(self, items):
        """Compute (token, position, sequence, whether the next token is wanted) of each item; the argmax of the wanted."""
        import numpy

        batch, self.batch.n_tokens = self.batch, len(items)
        for at, (token, position, sequence, wanted) in enumerate(items):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, wanted
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        assert self.c.llama_decode(self.context, batch) == 0
        rows = [self.c.llama_get_logits_ith(self.context, at) for at, item in enumerate(items) if item[3]]
        return [int(numpy.ctypeslib.as_array(row, (self.vocab_size,)).argmax()) for row in rows]

    def begin(self, sequence, prompt):
        """Bring a sequence to what it, or the first one, has of a prompt; returns how many tokens that is."""
        if not self.keeps:
            if sequence == 0:
                self.c.llama_memory_clear(self.memory, True)
            return 0
        first, own = (common(self.held.get(each, []), prompt[:-1]) for each in (0, sequence))
        if own < first:
            self.c.llama_memory_seq_rm(self.memory, sequence, -1, -1)
            self.c.llama_memory_seq_cp(self.memory, 0, sequence, 0, first)
        kept = max(first, own)
        if not self.c.llama_memory_seq_rm(self.memory, sequence, kept, -1):  # a state cannot go back to an earlier token
            kept = 0
            self.c.llama_memory_seq_rm(self.memory, sequence, -1, -1)
        self.held[sequence] = prompt[:kept]
        return kept

    def generate(self, prompts, output):
        """Greedy continuations of prompts of one length; returns how many tokens that were."""
        length, last, items = len(prompts[0]), [], []
        for sequence, prompt in enumerate(prompts):
            begin = self.begin(sequence, prompt)
            items += [(prompt[place], place, sequence, place == length - 1) for place in range(begin, length)]
        for first in range(0, len(items), BATCH):
            last += self.step(items[first : first + BATCH])
        self.held.update(enumerate(prompts))
        made = len(last)
        for more in range(output - 1):
            last = self.step([(token, length + more, sequence, True) for sequence, token in enumerate(last)])
            made += len(last)
        return made


TYPES = {"Q8_0": 7, "Q4_0": 2, "Q4_K_M": 15}
"""Numbers of llama_ftype."""


def quantised(source, target, form, threads):
    """Write the file in another type, by llama.cpp's own quantiser."""
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = TYPES[form], threads
    assert llama_cpp.llama_model_quantize(source.encode(), f"{target}.part".encode(), ctypes.byref(options)) == 0
    os.rename(target + ".part", target)


def file_of(folder, form, threads):
    """The GGUF file of a checkpoint in a type, made at the first use."""
    plain, path = (os.path.join(folder, f"model-{name}.gguf") for name in ("bf16", form))
    if not os.path.isfile(plain):
        convert(folder, plain)
    if not os.path.isfile(path):
        quantised(plain, path, form, threads)
    return path


def start(folder, threads):
    """Facts, and (prompts, output tokens) -> tokens made."""
    import llama_cpp

    form = os.environ.get("BENCH_FORM", "bf16")
    path = folder if os.path.isfile(folder) else file_of(folder, form, threads)
    context = Context(path, threads, int(os.environ.get("BENCH_CONTEXT", "0")))
    return {"name": f"llama.cpp {form}", "version": llama_cpp.__version__}, context.generate
