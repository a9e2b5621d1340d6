"""Reading the stage `routing`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from precompute.artifacts.vocabulary import VocabularyReader
from precompute.words import WORD_POSITIONS
from tide.frequency import NUM_DECILES

if TYPE_CHECKING:
    import pandas as pd

MEASURES = ("entropy", "injection_ratio")
"""What is measured beside the routing weights: their entropy in nats, 0 to ln(K+1), and |m| / |h|."""


class RoutingReader(VocabularyReader):
    """Routing (figure 10)."""

    def routing(self, token_id: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Routing weights at the positions of the text that hold this token.

        Returns:
            mean [L, K+1] and sample standard deviation [L, K+1], float32, null last, and n, the number of
            positions. A mean of no position and a deviation of fewer than two are NaN.

        Raises:
            ValueError: for a token id that is not there.
        """
        token_id = self._check_token(token_id)
        stored, row = self.tensors("routing"), slice(token_id, token_id + 1)
        n = int(stored.get_slice("n")[row][0])
        return stored.get_slice("mean")[row][0], stored.get_slice("sd")[row][0], n

    def routing_by_decile(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Routing weights over all positions whose token is of a frequency decile (figure 10).

        Returns:
            mean [10, L, K+1] and sample standard deviation [10, L, K+1], float32, null last, and n [10] int64,
            positions.
        """
        stored = self.tensors("routing")
        return tuple(stored.get_tensor(f"decile_{name}") for name in ("mean", "sd", "n"))  # type: ignore[return-value]

    def routing_overall(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Routing weights over all positions: mean [L, K+1], sample standard deviation [L, K+1], float32, and n."""
        stored = self.tensors("routing")
        return (
            stored.get_tensor("overall_mean"),
            stored.get_tensor("overall_sd"),
            int(stored.get_tensor("overall_n")[0]),
        )

    def routing_groups(self, by: str | None = None) -> "pd.DataFrame":
        """Routing weights over groups of positions (figure 10; all groupings but the deciles are ours).

        Args:
            by: "decile", the token's frequency decile; "domain", the held-out text; "word", the position in the word
                (`precompute.words`); None for all positions together.

        Returns:
            Columns group (0..9; name of the text; one of `WORD_POSITIONS`; "all"), layer, bank (K is null), mean, sd,
            low, high (95 % interval of the mean from a bootstrap over windows, NaN where one block of them alone holds
            the group), n (positions).

        Raises:
            ValueError: for another grouping.
        """
        groups, prefix = self._groups(by), by or "overall"
        keys = {"group": groups, "layer": range(self.num_layers), "bank": range(self.num_banks + 1)}
        return self._long(keys, prefix, "")

    def routing_measures(self, by: str | None = None) -> "pd.DataFrame":
        """Entropy of the routing weights and size of the injection over groups of positions; both ours.

        Args:
            by: as for `routing_groups`.

        Returns:
            Columns group, layer, measure, mean, sd, low, high, n, as `routing_groups` has them; measure is "entropy"
            (nats, over the K+1 weights: 0 where one has all, ln(K+1) where all are equal) or "injection_ratio"
            (|m| / |h|, the injection beside the residual stream that enters the layer).

        Raises:
            ValueError: for another grouping.
        """
        import pandas as pd

        groups, prefix = self._groups(by), by or "overall"
        keys = {"group": groups, "layer": range(self.num_layers)}
        tables = [self._long(keys, prefix, f"{measure}_") for measure in MEASURES]
        for table, measure in zip(tables, MEASURES, strict=True):
            table.insert(2, "measure", measure)
        return pd.concat(tables, ignore_index=True)

    def routing_measures_of(self, token_id: int) -> "pd.DataFrame":
        """Entropy and size of the injection at the positions of the text that hold this token.

        Returns:
            Columns layer, measure (as `routing_measures`), mean, sd, n. A mean of no position and a deviation of fewer
            than two are NaN.

        Raises:
            ValueError: for a token id that is not there.
        """
        import pandas as pd

        token_id = self._check_token(token_id)
        stored, row = self.tensors("routing"), slice(token_id, token_id + 1)
        n = int(stored.get_slice("n")[row][0])
        tables = [
            pd.DataFrame(
                {
                    "layer": range(self.num_layers),
                    "measure": measure,
                    **{what: stored.get_slice(f"{measure}_{what}")[row][0] for what in ("mean", "sd")},
                    "n": n,
                }
            )
            for measure in MEASURES
        ]
        return pd.concat(tables, ignore_index=True)

    def _groups(self, by: str | None) -> Sequence[int | str]:
        """The groups of a grouping, in the order in which they are stored."""
        if by is None:
            return ["all"]
        if by == "decile":
            return range(NUM_DECILES)
        if by == "domain":
            return list(self.parameters("text")["domains"])
        if by == "word":
            return WORD_POSITIONS
        raise ValueError(f'There is no grouping {by!r}; it is "decile", "domain" or "word", or None for all positions.')

    def _long(self, keys: dict[str, Sequence], prefix: str, measure: str) -> "pd.DataFrame":
        """Stored statistics as a table with a row a combination of keys."""
        import pandas as pd

        stored = self.tensors("routing")
        n = stored.get_tensor(f"{prefix}_n")  # (G,)
        rows = pd.MultiIndex.from_product(keys.values(), names=list(keys))
        values = {
            what: stored.get_tensor(f"{prefix}_{measure}{what}").reshape(-1) for what in ("mean", "sd", "low", "high")
        }
        return pd.DataFrame({**values, "n": n.repeat(len(rows) // len(n))}, index=rows).reset_index()

    def mean_injection(self) -> np.ndarray:
        """Mean over all positions of alpha_k M_k(v), what each (layer, bank) injects: [L, K, d] float32 (equation 3.6).

        n is that of `routing_overall`. It stands in for a bank that is switched off with the replacement "mean".
        """
        return self.tensors("routing").get_tensor("mean_injection")

    def once_contexts(self) -> list[np.ndarray]:
        """Contexts of up to 32 random tokens that the text holds once, by which their routing can be repeated live.

        Returns:
            Token ids [T] int64 of each, T up to 16; the last one is the token, its `routing` that of this position.
        """
        return [
            context[context >= 0].astype(np.int64) for context in self.tensors("routing").get_tensor("once_contexts")
        ]

    def top_tokens(self, layer: int, bank: int, k: int = 20, n_min: int = 5, largest: bool = True) -> "pd.DataFrame":
        """The tokens whose mean routing weight on a bank is largest (or smallest) in a layer.

        Args:
            layer: 0..L-1.
            bank: 0..K-1, or K for the null bank.
            k: how many tokens.
            n_min: tokens seen at fewer positions of the text are left out.
            largest: False for the smallest means.

        Returns:
            Columns token_id, mean, sd, n (positions), decile, count; ordered by mean, ties by token id.

        Raises:
            ValueError: for a layer or bank that is not there.
        """
        import pandas as pd

        layer, bank = self._check_layer(layer), self._check_bank(bank)
        stored = self.tensors("routing")
        n = stored.get_tensor("n")
        cell = (slice(None), slice(layer, layer + 1), slice(bank, bank + 1))
        mean, sd = (stored.get_slice(name)[cell].reshape(-1) for name in ("mean", "sd"))
        seen = np.flatnonzero(n >= max(n_min, 1))
        order = seen[np.argsort(-mean[seen] if largest else mean[seen], kind="stable")][: max(k, 0)]
        return pd.DataFrame(
            {
                "token_id": order,
                "mean": mean[order],
                "sd": sd[order],
                "n": n[order],
                "decile": self.bins[order],
                "count": self.counts[order],
            }
        )
