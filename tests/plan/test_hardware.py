import pytest

from titan_moe.plan.hardware import HARDWARE, resolve

CUSTOM = """
name = "X1"
architecture = "hopper"
bf16_tflops = 1000
fp8_tflops = 2000
hbm_gb = 96
hbm_tb_s = 4
nvlink_gb_s = 450
nvlink_domain = 16
nic_gb_s = 50
"""


def test_the_table_holds_the_published_peaks():
    for name, bf16, fp8, hbm, domain in (
        ("A100", 312, 0, 80, 8),
        ("H800", 989, 1979, 80, 8),
        ("B200", 2250, 4500, 180, 8),
        ("GB200", 2500, 5000, 184, 72),
        ("GB300", 2500, 5000, 276, 72),
        ("MI300X", 1307, 2615, 192, 8),
        ("MI355X", 2500, 5000, 288, 8),
    ):
        found = resolve(name.lower())
        assert (found.bf16_tflops, found.fp8_tflops, found.hbm_gb, found.nvlink_domain) == (bf16, fp8, hbm, domain)


def test_longer_names_are_understood():
    assert resolve("GB200 NVL72") is HARDWARE["GB200"] and resolve("NVIDIA H100 SXM") is HARDWARE["H100"]


def test_unknown_hardware_lists_the_known_and_says_how_to_define_it():
    with pytest.raises(ValueError) as caught:
        resolve("H9000")
    for name in (*HARDWARE, "H9000", "TOML", "nvlink_domain"):
        assert name in str(caught.value)


def test_mfu_is_a_share_of_the_precisions_own_peak():
    gb300 = HARDWARE["GB300"]
    assert [gb300.peak_tflops(p) for p in ("bf16", "mxfp8", "nvfp4")] == [2500, 5000, 15000]
    with pytest.raises(ValueError, match="A100: has no mxfp8 rate; it has bf16"):
        HARDWARE["A100"].peak_tflops("mxfp8")
    with pytest.raises(ValueError, match="H100: has no mxfp8 rate; it has bf16, fp8_current, fp8_block"):
        HARDWARE["H100"].peak_tflops("mxfp8")  # FP8, but no scales inside a contraction


def test_custom_hardware(tmp_path):
    path = tmp_path / "x1.toml"
    path.write_text(CUSTOM)
    found = resolve(str(path))
    assert (found.name, found.nvlink_domain, found.peak_tflops("fp8_block"), found.fp4_tflops) == ("X1", 16, 2000, 0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hbm_gb = 96", "", "hbm_gb: is missing"),
        ("hbm_gb = 96", 'hbm_gb = "96"', "must be a number"),
        ("nic_gb_s = 50", "nic_gb_s = 0", "must be greater than 0"),
        ("hopper", "voodoo", "choose one of ampere"),
        ('name = "X1"', 'name = "X1"\ncolour = 1', "colour: is not a property"),
        ("hbm_gb = 96", "hbm_gb", "x1.toml"),
    ],
)
def test_what_is_wrong_with_custom_hardware_is_said(tmp_path, old, new, message):
    path = tmp_path / "x1.toml"
    path.write_text(CUSTOM.replace(old, new))
    with pytest.raises(ValueError, match=message):
        resolve(str(path))


def test_a_missing_file_says_what_it_should_hold(tmp_path):
    with pytest.raises(ValueError, match="No such file.*architecture"):
        resolve(str(tmp_path / "none.toml"))
