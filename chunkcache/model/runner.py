"""One step of the forward pass, layer by layer, over a Hugging Face model's own submodules.

The library's ``generate()`` and cache classes hide what fusion needs: keys before RoPE, any set
of rows, any layer range. The runner offers exactly these pieces and knows nothing of pages,
attention or policies. What differs between families it reads from ``FamilyFacts`` and the spec.
"""

from typing import Any

import torch
from torch import nn

from chunkcache.errors import UnsupportedModelError
from chunkcache.identity import ModelDigest, ModelIdentity
from chunkcache.model.activation import steady_activations
from chunkcache.model.int8 import ROUNDING_DTYPE
from chunkcache.model.rotary import Rotary
from chunkcache.model.spec import ModelSpec, spec_from_config

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
        rows_are_independent: Whether a row of a product, of not too few rows, has the same bits
            whatever other rows there are.
    """

    def __init__(
        self,
        model: Any,
        identity: ModelIdentity,
        name: str,
        eos_token_ids: frozenset[int],
        *,
        rows_are_independent: bool,
    ) -> None:
        self.spec: ModelSpec = spec_from_config(model.config)
        self.identity = identity
        self.digest: ModelDigest = identity.digest()
        self.name = name
        self.eos_token_ids = eos_token_ids
        self.rows_are_independent = rows_are_independent
        self.hf_model = model.eval().requires_grad_(False)
        decoder = model.model
        self._embed: nn.Module = decoder.embed_tokens
        self._layers: list[Any] = list(decoder.layers)
        self._norm: Any = decoder.norm
        self._head: nn.Module = model.lm_head
        self.rotary = Rotary(decoder.rotary_emb, self.spec.rope)
        self._check_modules()
        for layer in self._layers:
            steady_activations(layer.mlp)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of hidden states, keys and values."""
        return self._norm.weight.dtype

    @property
    def rounding_dtype(self) -> torch.dtype:
        """Dtype that the inputs of matrix products are rounded to."""
        return self.dtype if self.identity.weights_format is None else ROUNDING_DTYPE

    def _check_modules(self) -> None:
        layer, family = self._layers[0], self.spec.family
        projections = ("qkv_proj",) if family.fused_projections else ("q_proj", "k_proj", "v_proj")
        norms = () if family.qk_norm == "none" else ("q_norm", "k_norm")
        wanted = (*projections, "o_proj", *norms)
        missing = [w for w in wanted if not hasattr(layer.self_attn, w)]
        missing += [w for w in (*family.norms.names(), "mlp") if not hasattr(layer, w)]
        if missing:
            raise UnsupportedModelError(
                f"a {family.name} layer without {', '.join(missing)}: "
                "this transformers release builds the family in another way"
            )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids ``[R]`` to hidden states ``[R, hidden]``."""
        embedded = self._embed(token_ids)
        multiplier = self.spec.embedding_multiplier
        return embedded if multiplier == 1.0 else embedded * multiplier

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
        module, spec = self._layers[layer], self.spec
        attention, qk_norm = module.self_attn, spec.family.qk_norm
        normed = _apply(module, spec.family.norms.attention_in, hidden)
        if spec.family.fused_projections:
            num_kv = spec.num_kv_heads * spec.head_dim
            sizes = [spec.num_heads * spec.head_dim, num_kv, num_kv]
            q, k, v = attention.qkv_proj(normed).split(sizes, dim=-1)
        else:
            q, k, v = attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed)
        if qk_norm == "projection":
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k, v = (x.unflatten(-1, (-1, spec.head_dim)) for x in (q, k, v))
        if qk_norm == "head":
            q, k = attention.q_norm(q), attention.k_norm(k)
        return q, k, v

    def finish(
        self,
        layer: int,
        hidden: torch.Tensor,
        attended: torch.Tensor,
        *,
        unrelated_rows: bool = False,
    ) -> torch.Tensor:
        """The rest of a layer after attention.

        Args:
            layer: Layer index.
            hidden: ``[R, hidden]``, the layer's input (the residual).
            attended: ``[R, num_heads, head_dim]``.
            unrelated_rows: Whether the rows belong to different requests. A block of experts then
                runs them one by one: it groups rows by expert, and in a group of another size a
                row has other bits.

        Returns:
            ``[R, hidden]``, the layer's output.
        """
        module, spec = self._layers[layer], self.spec
        norms, multiplier = spec.family.norms, spec.residual_multiplier
        out = module.self_attn.o_proj(attended.reshape(hidden.shape[0], -1))
        out = _scaled_in_place(_apply(module, norms.attention_out, out), multiplier).add_(hidden)
        block_rows = 1 if unrelated_rows and spec.family.experts else MLP_BLOCK_ROWS
        num_blocks = max(1, -(-len(out) // block_rows))
        for block in out.chunk(num_blocks):
            rows = _apply(module, norms.mlp_in, block)
            added = module.mlp(rows[None])[0] if spec.family.experts else module.mlp(rows)
            block.add_(_scaled_in_place(_apply(module, norms.mlp_out, added), multiplier))
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and head: ``[R, hidden]`` to fp32 logits ``[R, vocab]``."""
        logits, cap = self._head(self._norm(hidden)), self.spec.logits_softcap
        if self.spec.logits_divisor != 1.0:
            logits = logits / self.spec.logits_divisor
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits.float()


def _apply(layer: Any, norm: str | None, rows: torch.Tensor) -> torch.Tensor:
    """The rows through a layer's norm of that name; themselves where there is none."""
    return rows if norm is None else getattr(layer, norm)(rows)


def _scaled_in_place(rows: torch.Tensor, multiplier: float) -> torch.Tensor:
    return rows if multiplier == 1.0 else rows.mul_(multiplier)
