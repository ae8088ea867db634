import json

from sparse_mla_verify.__main__ import main


def test_attribute_tells_a_family_and_its_residual(tmp_path, capsys):
    arguments = ["attribute", "--families", "hugely-negative", "--workers", "1"]
    assert main([*arguments, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["family"] == "hugely-negative"
    assert found["tiles_differing"] == 0
    page = tmp_path / "page.md"
    page.write_text("<!-- figures: attribute -->\n<!-- /figures -->\n")
    assert main([*arguments, "--into", str(page)]) == 0
    assert "| P to its format (R11) |" in page.read_text()
    plots = sorted(tmp_path.glob("figures/*.svg"))
    assert [p.name for p in plots] == ["attribution-dark.svg", "attribution-light.svg"]
    assert main(["attribute", "--families", "counts", "--workers", "1"]) == 2
