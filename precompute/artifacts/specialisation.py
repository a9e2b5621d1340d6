"""Reading the stage `specialisation`."""

from typing import TYPE_CHECKING, Literal

import numpy as np

from precompute.artifacts.routing import RoutingReader
from precompute.artifacts.text import TextReader
from precompute.moments import beside, moments, sample_deviation

if TYPE_CHECKING:
    import pandas as pd

Measure = Literal["weight", "size"]
Grouping = Literal["decile", "domain", "kind", "before"]


class SpecialisationReader(TextReader, RoutingReader):
    """What the banks specialise in (ours)."""

    def top_contexts(self, layer: int, bank: int, by: Measure = "weight", k: int = 20) -> "pd.DataFrame":
        """The positions of the held-out text where a bank has the highest routing weight, or injects most, in a layer.

        Of one token id at most two positions are listed, and none of the first eight of a window. Special tokens,
        such as document marks, count like any other.

        Args:
            layer: 0..L-1.
            bank: 0..K-1, or K for the null bank, which has weights alone.
            by: "weight", or "size": |alpha_k M_k(v)|.
            k: how many, 0 to 20.

        Returns:
            Columns position (`context` shows it), token_id, weight (0 to 1), size (L2 norm in units of the residual
            stream), domain, before (tokens before it in the window: its context); the highest first, equal ones by
            position. Fewer rows where the text has fewer.

        Raises:
            ValueError: for a layer, bank, measure or k that is not there.
        """
        import pandas as pd

        _check_one_of(by, ("weight", "size"), "by")
        layer, bank = self._check_layer(layer), self._check_bank(bank, with_null=by == "weight")
        most = self.parameters("specialisation")["top_contexts"]
        if not 0 <= k <= most:
            raise ValueError(f"There are no {k} contexts; {most} are stored.")
        stored, cell = self.tensors("specialisation", "contexts"), (slice(layer, layer + 1), slice(bank, bank + 1))
        columns = ("position", "token_id", "weight", "size")
        rows = pd.DataFrame({name: stored.get_slice(f"{by}_{name}")[cell].reshape(-1)[:k] for name in columns})
        return self._placed(rows[rows["position"] >= 0])

    def top_tokens_by_size(self, layer: int, bank: int, k: int = 20, n_min: int = 5) -> "pd.DataFrame":
        """The tokens for which a bank injects most in a layer, by mean |alpha_k M_k(v)| over their positions.

        |M_k(v)| depends on the token alone: the mean is that of the weight times this norm. Reads the stage `routing`.

        Args:
            layer: 0..L-1.
            bank: 0..K-1.
            k: how many tokens.
            n_min: tokens seen at fewer positions of the text are left out.

        Returns:
            Columns token_id, mean, sd (L2 norm in units of the residual stream), n (positions), weight (mean routing
            weight), norm (|M_k(v)|), decile, count; ordered by mean, ties by token id.

        Raises:
            ValueError: for a layer or bank that is not there.
        """
        layer, bank = self._check_layer(layer), self._check_bank(bank, with_null=False)
        rows = self.top_tokens(layer, bank, k=self.vocab_size, n_min=n_min).sort_values("token_id")
        norm = self.tensors("specialisation", "tokens").get_slice("norm")[:, bank : bank + 1].reshape(-1)
        rows["norm"], rows["weight"] = norm[rows["token_id"]], rows["mean"]
        rows["mean"], rows["sd"] = rows["mean"] * rows["norm"], rows["sd"] * rows["norm"]
        rows = rows.sort_values("mean", ascending=False, kind="stable").head(max(k, 0)).reset_index(drop=True)
        return rows[["token_id", "mean", "sd", "n", "weight", "norm", "decile", "count"]]

    def null_contexts(self, token_id: int, layer: int | None = None) -> "pd.DataFrame":
        """The positions of a token where its null weight is lowest and highest: memory taken, memory declined.

        The first eight positions of every window are left out.

        Args:
            token_id: 0..V-1.
            layer: 0..L-1; None for the mean null weight over all layers.

        Returns:
            Columns end ("lowest", "highest"), position (`context` shows it), null_weight (0 to 1), domain, before
            (tokens before it in the window), n (positions of the token that were compared; of one, both ends are the
            same). Two rows; none where n is 0. Of equal weights the first position.

        Raises:
            ValueError: for a token id or layer that is not there.
        """
        import pandas as pd

        row = slice(self._check_token(token_id), self._check_token(token_id) + 1)
        column = self.num_layers if layer is None else self._check_layer(layer)
        stored, ends = self.tensors("specialisation", "tokens"), ("lowest", "highest")
        names = {"position": "null_{}_position", "null_weight": "null_{}"}
        cells = {
            name: [stored.get_slice(stored_as.format(end))[row, column : column + 1].item() for end in ends]
            for name, stored_as in names.items()
        }
        rows = pd.DataFrame({"end": ends, **cells})
        placed = self._placed(rows[rows["position"] >= 0])
        return placed.assign(n=int(stored.get_slice("n")[row][0]))

    def mass_split(self, by: Grouping = "decile", of: Measure = "weight") -> "pd.DataFrame":
        """How the mass of every (layer, bank) splits among groups of positions.

        Args:
            by: "decile" of the token's frequency, "domain" of the text, "kind" of token (`precompute.kinds`), or
                "before", the tokens before the position in its window.
            of: "weight", the routing weight; or "size", |alpha_k M_k(v)|, which the null bank does not have.

        Returns:
            Columns layer, bank (K is null), group (a decile, -1 for none; a name; "4-7"), share (of the bank's total in
            this layer), share_of_positions, lift (share / share_of_positions: 1 where the bank takes no notice of the
            group), mean and sd (of the weight or size over the group's positions), n (positions). A group without
            positions has share 0 and NaN for lift and mean.

        Raises:
            ValueError: for a grouping or measure that is not there.
        """
        import pandas as pd

        _check_one_of(by, ("decile", "domain", "kind", "before"), "by")
        _check_one_of(of, ("weight", "size"), "of")
        stored = self.tensors("specialisation", "groups")
        sums, squares = (stored.get_tensor(f"{by}_{of}_{name}") for name in ("sum", "squares"))  # [G, L, banks]
        n = stored.get_tensor(f"{by}_n")
        mean, deviations = moments(sums, squares, n)
        with np.errstate(invalid="ignore"):  # 0 / 0, of a bank without mass or a group without positions
            share, share_of_positions = sums / sums.sum(axis=0), n / n.sum()
            lift = share / beside(share_of_positions, share)
        names: list[int] | list[str] = {
            "decile": [*range(len(n) - 1), -1],
            "domain": self.domains,
            "kind": self.parameters("specialisation")["kinds"],
            "before": ["0", "1", *(f"{2**bits}-{2 ** (bits + 1) - 1}" for bits in range(1, len(n) - 1))],
        }[by]
        _, layers, banks = sums.shape
        index = pd.MultiIndex.from_product([range(layers), range(banks), names], names=["layer", "bank", "group"])
        values = {"share": share, "lift": lift, "mean": mean, "sd": sample_deviation(deviations, n)}
        table = pd.DataFrame({name: array.transpose(1, 2, 0).reshape(-1) for name, array in values.items()}, index)
        for name, array in (("share_of_positions", share_of_positions), ("n", n)):
            table[name] = np.tile(array, layers * banks)
        return table.reset_index()[["layer", "bank", "group", "share", "share_of_positions", "lift", "mean", "sd", "n"]]

    def token_kinds(self) -> np.ndarray:
        """The kind of every token id: [V] int8, an index into `parameters("specialisation")["kinds"]`."""
        return self.tensors("specialisation", "tokens").get_tensor("kind")

    def _placed(self, rows: "pd.DataFrame") -> "pd.DataFrame":
        """Rows with a column position, and where that is: domain, before."""
        positions = rows["position"].to_numpy()
        starts = self._file_starts()
        files = np.searchsorted(starts, positions, side="right") - 1
        before = (positions - starts[files]) % self.window_tokens
        domains = np.array(self.domains, dtype=object)[files]
        return rows.assign(domain=domains, before=before).reset_index(drop=True)


def _check_one_of(value: str, known: tuple[str, ...], name: str) -> None:
    if value not in known:
        raise ValueError(f"{name} is one of {', '.join(map(repr, known))}, not {value!r}.")
