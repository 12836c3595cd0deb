"""gated_activation against its reference, at every instruction level."""

import pytest
import torch

from exl3.errors import ConfigError
from exl3.ops.activation import ACTIVATIONS, gated_activation, gated_activation_reference

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize(("m", "n"), [(0, 16), (1, 1536), (3, 17), (16, 1), (17, 1003)])
def test_matches_reference(isa: str, kind: str, m: int, n: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(m, 2 * n) * 4
    want = gated_activation_reference(x, kind)
    torch.testing.assert_close(gated_activation(x, kind), want, rtol=2e-6, atol=3e-6)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_whole_range_of_gates(isa: str, kind: str) -> None:
    gate = torch.cat([torch.linspace(-120, 120, 4001), torch.tensor([0.0, -0.0, 1e-30, 3e38])])
    x = torch.cat([gate, torch.ones_like(gate)])[None]
    want = gated_activation_reference(x, kind)
    # Absolute floor: erf of the vector levels; relative: exp of arguments up to 120.
    torch.testing.assert_close(gated_activation(x, kind), want, rtol=1e-5, atol=1e-6)


def test_nan_stays_and_rows_may_be_strided(isa: str) -> None:
    wide = torch.randn(3, 80)
    wide[1, 5] = torch.nan
    x = wide[:, :64]
    got = gated_activation(x, "silu")
    assert got.isnan().nonzero().tolist() == [[1, 5]]
    want = gated_activation_reference(x, "silu")
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-6, equal_nan=True)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match="expected one of silu"):
        gated_activation(torch.zeros(1, 2), "swish")
    with pytest.raises(RuntimeError, match="even number"):
        gated_activation(torch.zeros(1, 3), "silu")


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.exl3.gated_activation.default, (torch.randn(2, 34), 0))
