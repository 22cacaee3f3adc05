"""KV offloading (what vLLM does by a KV connector): prefix blocks that outlive the KV cache and the process, in files of a
bounded folder."""
