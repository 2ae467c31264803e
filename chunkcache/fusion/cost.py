"""What a fusion really cost: rows run, layer by layer, probes and checks included."""


class CostMeter:
    """Counts rows per layer.

    ``charged_ratio`` is rows run summed over layers, over ``layers * context tokens``: the share
    of a bare prefill of the context. It counts everything that ran (probes, check layers, template
    and question rows), so it may exceed the nominal ratio by far, and exceeds 1 for ``full``.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._row_layers = 0

    def charge(self, num_rows: int) -> None:
        """Count ``num_rows`` rows of one layer."""
        self._row_layers += num_rows

    @property
    def row_layers(self) -> int:
        """Rows run, summed over layers."""
        return self._row_layers

    def charged_ratio(self, num_context_tokens: int) -> float:
        """Rows run over ``layers * num_context_tokens``; 0 without context."""
        whole = self._num_layers * num_context_tokens
        return self._row_layers / whole if whole else 0.0
