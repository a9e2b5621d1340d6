"""Reading the stage `history`."""

from typing import TYPE_CHECKING

from precompute.artifacts.reader import Reader

if TYPE_CHECKING:
    import pandas as pd


class HistoryReader(Reader):
    """What training kept about itself; model is "tide" or "base", decile -1 the token types without one."""

    def history_routing(self, layer: int | None = None, bank: int | None = None) -> "pd.DataFrame":
        """Mean routing weights over training (figure 10 at every step that was kept). Base has none.

        Args:
            layer: 0..L-1; None for all.
            bank: 0..K-1, or K for the null bank; None for all.

        Returns:
            Columns model, step, tokens (seen in training), layer, decile (of the token at the position), bank, mean,
            n (positions of the run's probe text). No spread was kept.

        Raises:
            ValueError: for a layer or bank that is not there.
        """
        rows = self.frame("history", "routing")
        if layer is not None:
            rows = rows[rows["layer"] == self._check_layer(layer)]
        if bank is not None:
            rows = rows[rows["bank"] == self._check_bank(bank)]
        return rows.reset_index(drop=True)

    def history_norms(self) -> "pd.DataFrame":
        """L2 norms of the rows of the input embedding and of the raw rows E_k[v] over training (figure 1).

        Returns:
            Columns model, step, tokens, table ("embedding", "bank_0", ...), decile, mean, sd (sample standard
            deviation over types), n (token types).
        """
        return self.frame("history", "norms")

    def history_losses(self) -> "pd.DataFrame":
        """Cross entropy of the probe text by the decile of the token to predict, over training (figure 5).

        Returns:
            Columns model, step, tokens, decile, mean (nats), sd (sample standard deviation over positions), n
            (positions).
        """
        return self.frame("history", "losses")

    def history_gradients(self) -> "pd.DataFrame":
        """Squared L2 norms of the gradients of rows, summed over the steps so far, before clipping (proposition 3.2).

        Returns:
            Columns model, step, tokens, table ("embedding", through the lookup; "embedding_parameter", what a tied
            unembedding adds included; "bank_0", ...; "total", the lookups of all tables together), decile, mean, n
            (token types). No spread was kept.
        """
        return self.frame("history", "gradients")
