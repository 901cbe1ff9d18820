"""Import and export against transformers: every weight bit for bit there and back, and the same training in between."""

import json

import titan_moe.runtime

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import titan_moe.huggingface.load
from tests.huggingface import peers
from tests.huggingface.peers import files
from titan_moe.attention import documents
from titan_moe.config_check import check
from titan_moe.huggingface import folder
from titan_moe.huggingface.export import export
from titan_moe.huggingface.load import Piece, _read, load


def their_logits(model: nn.Module) -> Tensor:
    tokens_BL, positions_BL = peers.ids()
    with torch.no_grad():
        return model.eval()(tokens_BL, position_ids=positions_BL).logits


@pytest.mark.parametrize("shape", peers.marked("deepseek_v3 as", "deepseek_v2 groups", "qwen3", "mixtral 12"))
def test_weights_come_back_bit_for_bit(shape, tmp_path, group):
    """And as a model that computes the same in transformers. test_matrix.py compares ours with it."""
    theirs = peers.peer(shape)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="200KB")
    config = peers.configuration(shape, tmp_path / "theirs")
    config.checkpoint.last_save_in_hf = True
    assert check(config, 1) == []
    model = peers.ours(config)
    load(tmp_path / "theirs", config, [model], group)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "step-1")
    export(config, tmp_path / "step-1", tmp_path / "back", None)
    before, after = files(tmp_path / "theirs"), files(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in before.items())
    returned, told = AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", output_loading_info=True, dtype=torch.float32, **peers.EAGER
    )
    assert type(returned) is type(theirs) and not told["missing_keys"] and not told["unexpected_keys"], told
    assert torch.equal(their_logits(returned), their_logits(theirs))


def test_bfloat16_comes_back_bit_for_bit_and_the_bias_in_float32(tmp_path, group, monkeypatch):
    """Through fp32 parameters, as in training; in several files, with their index."""
    monkeypatch.setattr("titan_moe.huggingface.export.FILE_BYTES", 100_000)
    theirs = peers.peer("deepseek_v3").bfloat16()
    for layer in theirs.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias = layer.mlp.gate.e_score_correction_bias.float() + 2**-20
    theirs.save_pretrained(tmp_path / "theirs")
    config = peers.configuration("deepseek_v3", tmp_path / "theirs")
    model = peers.ours(config)
    load(tmp_path / "theirs", config, [model], group)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "step-1")
    export(config, tmp_path / "step-1", tmp_path / "back", torch.bfloat16)
    before, after = files(tmp_path / "theirs"), files(tmp_path / "back")
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 3
    assert before.keys() == after.keys()
    assert {after[name].dtype for name in after if "correction" in name} == {torch.float32}
    for name, value in before.items():
        assert torch.equal(after[name].to(value.dtype), value), name
    returned = AutoModelForCausalLM.from_pretrained(tmp_path / "back", **peers.EAGER)
    assert returned.dtype == torch.bfloat16


def test_the_built_in_tokenizer_is_exported(tmp_path, group):
    config = peers.configuration("deepseek_v3")
    dcp.save(peers.ours(config).state_dict(), checkpoint_id=tmp_path / "step-1")
    export(config, tmp_path / "step-1", tmp_path / "back", None)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "back")
    text = "Grüße, 世界\n\t\x00  !"
    (encoded,) = tokenizer([text], add_special_tokens=False)["input_ids"]
    assert encoded == list(text.encode())
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    assert tokenizer.decode(encoded) == text


def test_multi_token_prediction_travels_in_the_published_layout(tmp_path, group):
    """Layer n_layers with copies of embedding and head; read back, and left out where none is configured. transformers
    ignores that layer in published models."""
    config = peers.configuration("deepseek_v3")
    config.model.num_mtp_layers = 2
    model = peers.ours(config)
    before = peers.fingerprint(model)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "step-1")
    export(config, tmp_path / "step-1", tmp_path / "hf", None)
    stored = files(tmp_path / "hf")
    for i, layer in enumerate(("model.layers.3", "model.layers.4")):
        assert torch.equal(stored[f"{layer}.embed_tokens.weight"], before["tok_embeddings.weight"])
        assert torch.equal(stored[f"{layer}.shared_head.head.weight"], before["lm_head.weight"])
        for theirs, name in (("enorm", "enorm"), ("hnorm", "hnorm"), ("eh_proj", "eh_proj")):
            assert torch.equal(stored[f"{layer}.{theirs}.weight"], before[f"mtp_layers.{i}.{name}.weight"])
        assert torch.equal(stored[f"{layer}.shared_head.norm.weight"], before[f"mtp_layers.{i}.mtp_norm.weight"])
        experts = before[f"mtp_layers.{i}.moe.routed_experts.inner_experts.w3_EFD"]
        assert torch.equal(stored[f"{layer}.mlp.experts.5.up_proj.weight"], experts[5])

    config.checkpoint.initial_load_path = str(tmp_path / "hf")
    for layers in (2, 0):
        config.model.num_mtp_layers = layers
        again = peers.ours(config)
        with torch.no_grad():
            for value in again.parameters():
                value.fill_(torch.nan)
        load(tmp_path / "hf", config, [again], group)
        for name, value in peers.fingerprint(again).items():
            assert torch.equal(value, before[name]), name


def test_each_header_is_read_once_before_the_weights(tmp_path, group, monkeypatch):
    """And each file opened once for them: a network's file system makes one wait for every time."""
    theirs = peers.peer("mixtral")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    config = peers.configuration("mixtral", tmp_path / "theirs")
    headers, opened = [], []
    read_header, safe_open = folder.read_header, titan_moe.huggingface.load.safe_open
    monkeypatch.setattr(folder, "read_header", lambda path: headers.append(path) or read_header(path))
    monkeypatch.setattr(
        "titan_moe.huggingface.load.safe_open", lambda path, **k: opened.append(path) or safe_open(path, **k)
    )
    load(tmp_path / "theirs", config, [peers.ours(config)], group)
    assert headers == opened == sorted((tmp_path / "theirs").glob("*.safetensors")) and len(headers) > 3


def test_an_unreadable_file_is_an_error_on_all_ranks_not_one(tmp_path, group, monkeypatch):
    peers.peer("mixtral").save_pretrained(tmp_path / "theirs")
    config = peers.configuration("mixtral", tmp_path / "theirs")
    model = peers.ours(config)

    def broken(*_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("titan_moe.huggingface.load.safe_open", broken)
    with pytest.raises(ValueError, match=r"theirs' could not be read; rank 0: .*Input/output error"):
        load(tmp_path / "theirs", config, [model], group)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 in blocks of 128 x 128, as DeepSeek publishes: the block's largest number becomes 448."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // 128), -(-columns // 128))
    quantized = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            scale[i, j] = weight[at].abs().max() / 448
            quantized[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
    return quantized, scale


def test_fp8_blocks_equal_those_dequantized_beforehand(tmp_path, group):
    """Rows and columns that are no multiples of 128 too; what is not quantized (norms, router, head) is as it was."""
    sizes = {"dim": 192, "moe_hidden_dim": 136, "dense_hidden_dim": 300}
    config = peers.configuration("deepseek_v3")
    for key, value in sizes.items():
        setattr(config.model, key, value)
    model = peers.ours(config)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "step-1")
    export(config, tmp_path / "step-1", tmp_path / "plain", None)
    plain = files(tmp_path / "plain")
    stored, dequantized = {}, {}
    for name, value in plain.items():
        stored[name] = dequantized[name] = value
        if name.endswith("proj.weight"):
            stored[name], stored[name + "_scale_inv"] = quantize(value)
            rows, columns = torch.meshgrid(*(torch.arange(n) // 128 for n in value.shape), indexing="ij")
            dequantized[name] = stored[name].float() * stored[name + "_scale_inv"][rows, columns]
            assert not torch.equal(dequantized[name], value)
    content = json.loads((tmp_path / "plain" / "config.json").read_text())
    found = []
    for kind, values, more in (
        ("fp8", stored, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}),
        ("dequantized", dequantized, {}),
    ):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps(content | more))
        save_file(values, tmp_path / kind / "model.safetensors")
        loaded = peers.ours(config)
        load(tmp_path / kind, config, [loaded], group)
        found.append(peers.fingerprint(loaded))
    fp8, expected = found
    assert len({value.dtype for value in stored.values()}) == 2
    assert all(torch.equal(fp8[name], value) for name, value in expected.items())
    # As a rank of a mesh reads it: a slice that begins and ends inside blocks. And scales in a file of their own.
    name, part = "model.layers.0.mlp.gate_proj.weight", torch.empty(150, 80)
    (tmp_path / "apart").mkdir()
    scales = {n for n in stored if n.endswith("_scale_inv")}
    save_file({n: stored[n] for n in scales}, tmp_path / "apart" / "scales.safetensors")
    save_file({n: stored[n] for n in stored.keys() - scales}, tmp_path / "apart" / "weights.safetensors")
    index = {n: "scales.safetensors" if n in scales else "weights.safetensors" for n in stored}
    (tmp_path / "apart" / folder.INDEX).write_text(json.dumps({"weight_map": index}))
    for where in ("fp8", "apart"):
        there, _ = folder.tensors(tmp_path / where)
        _read(tmp_path / where, [Piece(name, (100, 90), part.fill_(torch.nan))], there, (128, 128))
        assert torch.equal(part, dequantized[name][100:250, 90:170])


@pytest.mark.parametrize(
    "shape",
    ["deepseek_v3", *(pytest.param(s, marks=pytest.mark.slow) for s in ("deepseek_v2 lite", "qwen3", "mixtral"))],
)
def test_three_steps_equal_three_steps_of_transformers(shape, tmp_path, group):
    """AdamW on the same batches; the router's bias, which is not zero, stays where it is on both sides. An epsilon of
    1e-6, because Adam's first step is a gradient's sign: with 1e-8 that of rounding, where the gradient is no more."""
    theirs = peers.peer(shape)
    theirs.save_pretrained(tmp_path / "theirs")
    config = peers.configuration(shape, tmp_path / "theirs")
    model = peers.ours(config).train()
    load(tmp_path / "theirs", config, [model], group)
    theirs.train()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-6) for each in (model, theirs)]
    for step in range(3):
        torch.manual_seed(step)
        tokens_BL, labels_BL = torch.randint(0, peers.ROWS, (2, 2, peers.LENGTH)).unbind()
        positions_BL = torch.arange(peers.LENGTH).expand(2, -1)
        logits = model(tokens_BL, positions=positions_BL, attention_masks=documents(positions_BL))
        expected = theirs(tokens_BL, position_ids=positions_BL).logits
        for out in (logits, expected):
            nn.functional.cross_entropy(out.flatten(0, 1), labels_BL.flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "step-3")
    export(config, tmp_path / "step-3", tmp_path / "back", None)
    start = files(tmp_path / "theirs")
    theirs.save_pretrained(tmp_path / "trained")
    trained, back = files(tmp_path / "trained"), files(tmp_path / "back")
    assert trained.keys() == back.keys()
    learned = set()
    for name, value in trained.items():
        moved = (value - start[name]).norm()
        if moved > 0.01 * start[name].norm():
            learned.add(name)
        assert (back[name] - value).norm() <= 2e-3 * moved, name
    still = trained.keys() - learned  # experts that no token chose, for the bias; and the bias
    assert all("correction" in name or ".experts." in name for name in still) and len(still) < len(learned), still
