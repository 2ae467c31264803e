"""One step of the forward pass, layer by layer, over a Hugging Face model's own submodules.

The library's ``generate()`` and cache classes hide what fusion needs: keys before RoPE, any set
of rows, any layer range. The runner offers exactly these pieces and knows nothing of pages,
attention or policies.
"""

from typing import Any

import torch
from torch import nn

from chunkcache.errors import UnsupportedModelError
from chunkcache.identity import ModelDigest, ModelIdentity
from chunkcache.model.families import ModelSpec, spec_from_config
from chunkcache.model.rotary import Rotary

MLP_BLOCK_ROWS = 1024
"""Most rows per MLP call: larger blocks fall out of the CPU's caches (measured: 2,000 rows in one
call run a quarter slower than in blocks of 512). Blocks are of equal size, because products of few
rows are slow. A row's block depends on the request alone."""


class ModelRunner:
    """The forward of one model, in pieces.

    Attributes:
        spec: Geometry and facts.
        identity: What the model's entries depend on.
        digest: Digest of ``identity``.
        name: Display name; never part of a key.
        eos_token_ids: Every id that ends an answer.
        rotary: The model's rotation tables.
    """

    def __init__(
        self, model: Any, identity: ModelIdentity, name: str, eos_token_ids: frozenset[int]
    ) -> None:
        self.spec: ModelSpec = spec_from_config(model.config)
        self.identity = identity
        self.digest: ModelDigest = identity.digest()
        self.name = name
        self.eos_token_ids = eos_token_ids
        self.hf_model = model.eval().requires_grad_(False)
        decoder = model.model
        self._embed: nn.Module = decoder.embed_tokens
        self._layers: list[Any] = list(decoder.layers)
        self._norm: nn.Module = decoder.norm
        self._head: nn.Module = model.lm_head
        self.rotary = Rotary(
            decoder.rotary_emb, self.spec.num_layers, self.spec.rope_is_length_dependent
        )
        self._check_modules()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._layers[0].self_attn.o_proj.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the computation."""
        return self._layers[0].self_attn.o_proj.weight.dtype

    def _check_modules(self) -> None:
        layer = self._layers[0]
        wanted = ["q_proj", "k_proj", "v_proj", "o_proj"]
        if self.spec.family.qk_norm:
            wanted += ["q_norm", "k_norm"]
        missing = [w for w in wanted if not hasattr(layer.self_attn, w)]
        missing += [
            w
            for w in ("input_layernorm", "post_attention_layernorm", "mlp")
            if not hasattr(layer, w)
        ]
        if missing:
            raise UnsupportedModelError(
                f"a {self.spec.family.name} layer without {', '.join(missing)}: "
                "this transformers release builds the family in another way"
            )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids ``[R]`` to hidden states ``[R, hidden]``."""
        return self._embed(token_ids)

    def project(
        self, layer: int, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys **before RoPE** and values of some rows.

        Args:
            layer: Layer index.
            hidden: ``[R, hidden]``.

        Returns:
            ``q [R, num_heads, head_dim]``, ``k`` and ``v [R, num_kv_heads, head_dim]``; q and k
            after their norms, if the family has them.
        """
        module = self._layers[layer]
        attention = module.self_attn
        normed = module.input_layernorm(hidden)
        shape = (hidden.shape[0], -1, self.spec.head_dim)
        q = attention.q_proj(normed).view(shape)
        k = attention.k_proj(normed).view(shape)
        v = attention.v_proj(normed).view(shape)
        if self.spec.family.qk_norm:
            q, k = attention.q_norm(q), attention.k_norm(k)
        return q, k, v

    def finish(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of a layer after attention.

        Args:
            layer: Layer index.
            hidden: ``[R, hidden]``, the layer's input (the residual).
            attended: ``[R, num_heads, head_dim]``.

        Returns:
            ``[R, hidden]``, the layer's output.
        """
        module = self._layers[layer]
        out = module.self_attn.o_proj(attended.reshape(hidden.shape[0], -1)).add_(hidden)
        num_blocks = max(1, -(-len(out) // MLP_BLOCK_ROWS))
        for block in out.chunk(num_blocks):
            block.add_(module.mlp(module.post_attention_layernorm(block)))
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and head: ``[R, hidden]`` to fp32 logits ``[R, vocab]``."""
        return self._head(self._norm(hidden)).float()
