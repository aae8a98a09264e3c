"""The report: what it says, that it needs nothing else, and how it works in a browser."""

import base64
import html
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from browser import at_width, chromium, sideways
from by_hand import A, B, make

import foldwise as fw
from foldwise.results import report
from foldwise.results.about import About
from foldwise.results.report_trust import commands, draws_table, lights_of
from foldwise.studies import cli

EVIL = "<script>window.evil=1</script>\"'&"


class Page(HTMLParser):
    """Elements of a page with their attributes, and its text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def many(seed, folds=400, status="fine", shift=0.0, model="", **info):
    """A result by hand of many folds, with all that tables have."""
    rng = np.random.default_rng(seed)
    result = make(
        -3.0 + rng.normal(size=folds) - shift,
        mcse=0.01,
        seed=seed,
        status=status,
        model=model,
        names=[f"county {k}" for k in range(folds)],
        **info,
    )
    result.info["n_obs"] = folds
    for score in result.scores.values():
        for name, low, high in (("rhat", 1.0, 1.02), ("ess", 100, 900), ("overlap", 50, 400)):
            score.folds[name] = ("fold", rng.uniform(low, high, folds))
        score.folds["pareto_k"] = ("fold", np.full(folds, np.nan))
    return result


@pytest.fixture(scope="module")
def compared():
    status = np.where(np.arange(400) == 7, "chains disagree", "fine")
    return fw.compare({"good": many(1, status=status), "poor": many(2, shift=0.8)})


@pytest.fixture(scope="module")
def written(compared, tmp_path_factory):
    return compared.report(tmp_path_factory.mktemp("report") / "x.html")


@pytest.fixture(scope="module")
def page(written):
    return Page(written.read_text())


# ---------------------------------------------------------------- content


def test_the_verdict_comes_first(page, compared):
    assert compared.verdict.kind == "better"
    assert compared.verdict.sentence in page.text
    before, after = page.text.split(compared.verdict.headline, 2)[1:]
    assert "How to cite" in after
    classes = [attributes.get("class", "") for _, attributes in page.elements]
    assert "verdict better" in classes


@pytest.mark.parametrize(
    "words",
    [
        "95 % interval by Student's t",
        "400 folds that test 1 row each",
        "The largest differences are those of folds county",
        "Without these two, good is ahead by",
        "1 of 400 flagged",
        "chains disagree: 1 of 400 folds (county 7)",
        "foldwise.cross_validate(model, folds, warmup=200, draws=200)",
        "10 times as many",
        "folds of good 400 folds: 4 chains x 100 draws a fold",
        "Cooper, A., Vehtari, A.",
        "Pr(worse) is the probability that the model predicts worse than the first one",
    ],
)
def test_what_a_report_has(page, words):
    assert words in page.text


def without_chains(values, **info):
    """A result by hand of weights, and a refit of the first fold."""
    result = make(values, mcse=0.1, model="A", fit_draws=4000, warmup=50, given_seed=5, **info)
    empty = ("fold", np.full(len(values), np.nan))
    method = ["refit", *["importance"] * (len(values) - 1)]
    for score in result.scores.values():
        score.folds["method"], score.folds["pareto_k"] = ("fold", method), 0.0 * score.folds["mcse"]
        score.folds["rhat"] = score.folds["overlap"] = empty
        vars(score).update(own_variance=0.01, full_variance=0.03)
    nothing = replace(result.mixing, rhat=np.full(len(values), np.nan), benchmark=np.zeros(0))
    return replace(result, mixing=nothing)


def test_a_report_without_chains_speaks_of_none():
    """Neither of their settings, nor of their diagnostics, nor of what longer ones would bring."""
    results = {"A": without_chains(A, seed=6), "B": without_chains(B, seed=7)}
    text = report.report_html(results, fw.compare(results), About())
    page = Page(text)
    assert "folds of A 1 fold:" not in page.text
    assert "3 folds: weights of 4,000 full-data draws; 1 fold: refitted" in page.text
    assert "seed 5 (this model's own: 6)" in page.text
    for words in ("draws a chain", "chains alone", "warm-up", "given_seed", "4 chains"):
        assert words not in page.text, words
    assert "now from 4,000 full-data draws" in page.text
    assert "The part of refitted folds stays." in page.text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    assert data["columns"][:6] == ["model", "fold", "elpd", "mcse", "method", "status"]
    assert "pareto_k" in data["columns"] and not {"rhat", "overlap"} & set(data["columns"])


def test_what_more_full_data_draws_bring_leaves_refits_as_they_are():
    """MCSE is sqrt(full / times + fixed); there are no chains to be longer."""
    results = {"A": without_chains(A)}
    table = draws_table(results, None)
    assert [cell["text"] for cell in table["head"]] == ["draws", "MCSE", "MCSE / SE"]
    scale = results["A"].mcse ** 2 / 0.04
    for row, times in zip(table["rows"], (1, 2, 4, 10), strict=True):
        wanted = np.sqrt(scale * (0.03 / times + 0.01))
        assert float(row[1]["text"]) == pytest.approx(wanted, rel=0.05)


def test_it_needs_nothing_else_and_is_small(page, written):
    assert written.stat().st_size < 2_000_000
    for tag, attributes in page.elements:
        for name in ("src", "href"):
            if name in attributes:
                assert attributes[name].startswith(("data:", "#")), (tag, attributes[name][:80])
    assert "@import" not in written.read_text() and "url(" not in written.read_text()


def test_every_figure_is_drawn_and_has_an_alt_text(page):
    images = [attributes for tag, attributes in page.elements if tag == "img"]
    assert len(images) == 5  # scheme, forest, differences, and diagnostics of each
    for image in images:
        assert len(image["alt"]) > 15 and "not drawn" not in image["alt"]
        content = base64.b64decode(image["src"].partition("base64,")[2])
        assert content.startswith((b"<?xml", b"\x89PNG"))


def test_all_numbers_are_in_it(written, compared):
    text = written.read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    assert len(data["folds"]) == 800
    first = dict(zip(data["columns"], data["folds"][0], strict=True))
    assert first["model"] == "good" and first["fold"] == "county 0"
    elpd = compared.results["good"].folds["elpd"].values
    assert first["elpd"] == pytest.approx(elpd[0], rel=1e-5)
    assert data["verdict"]["kind"] == "better"
    assert data["comparison"][1]["elpd_diff"] == pytest.approx(
        compared.table["elpd_diff"].iloc[1], rel=1e-5
    )


def test_names_are_escaped(tmp_path):
    names = [EVIL, EVIL + "2"]
    one, two = (
        make(v, seed=k, names=[f"{EVIL}{i}" for i in range(4)]) for k, v in enumerate((A, B))
    )
    found = fw.compare(dict(zip(names, (one, two), strict=True)))
    text = found.report(tmp_path / "evil").read_text()
    assert "<script>window.evil" not in text and html.escape(EVIL)[:20] in text
    for shown in (found._repr_html_(), one._repr_html_()):
        assert "<script>window.evil" not in shown


def test_a_single_result_and_a_part_of_a_scheme(tmp_path):
    known = {"identity": {"scheme": "x", "folds": 99, "model": []}, "n_obs": 50}
    one = make(A, model="only", fit_problems="R-hat is up to 1.2 (should be below 1.01)", **known)
    page = Page(one.report(tmp_path / "one.html").read_text())
    assert "Only 4 of 99 folds were run" in page.text
    assert "Not to be trusted: the full-data fit has not converged (R-hat is up to 1.2" in page.text
    assert "Which folds decide" not in page.text
    assert not (tmp_path / "one").exists()
    with pytest.raises(OSError, match="choose a folder that exists"):
        one.report(tmp_path / "missing" / "one.html")


def test_notebooks_show_the_same_pieces(compared):
    shown = Page(compared._repr_html_())
    assert compared.verdict.sentence in shown.text and "Pr(worse)" in shown.text
    alone = Page(compared.results["poor"]._repr_html_())
    assert "Reliable" in alone.text and "none flagged" in alone.text


def test_lights_follow_the_numbers():
    good = many(1, 20)
    assert [light.level for light in lights_of(good)] == ["good"] * 6
    flagged = lights_of(many(1, 20, status="heavy tail"))
    assert flagged[1].level == "bad" and flagged[1].text == "20 of 20 flagged"
    few = many(1, 20)
    few.folds["ess"].values[3] = 20.0
    few.folds["overlap"].values[4] = 5.0
    levels = [light.level for light in lights_of(few)]
    assert levels == ["good", "good", "good", "bad", "watch", "good"]
    broken = many(1, 20, fit_problems="ESS is down to 30 (should be over 400)")
    assert lights_of(broken)[0].level == "bad"


def test_commands_are_those_of_where_it_was_run():
    result = many(1, 20, status="chains disagree", draws=100, warmup=50)
    assert commands(result) == ["foldwise.cross_validate(model, folds, warmup=200, draws=200)"]
    assert (
        commands(result, "foldwise run my.py")[1] == "foldwise run my.py --warmup 200 --draws 200"
    )
    assert commands(many(1, 20, status="poor overlap")) == ["result.extend(100)"]
    assert "reparameterise" in commands(many(1, 20, status="too slow"))[0]
    assert "score by row" in commands(many(1, 20, status="heavy tail"))[0]
    assert commands(many(1, 20)) == []


def test_the_run_is_told():
    extra = About("a title", "foldwise run x.py", {"draws": 60}, source="x = 1 < 2")
    page = Page(report.report_html({"m": many(1, 20)}, None, extra))
    assert "foldwise run x.py" in page.text and "x = 1 < 2" in page.text
    assert "draws: 60" in page.text and "numpy" in page.text and "cores" in page.text


def test_a_real_run_by_weights_and_by_chains(prepared, seed, tmp_path):
    """Predictive draws give calibration; chains are shown where there are any."""
    problem, model, fit = prepared("regression")
    run = {"fit": fit, "scores": ("log", "crps"), "progress": False, "seed": seed}
    for method, chains in (("auto", False), ("mcmc", True)):
        result = fw.cross_validate(model, problem.folds, method=method, draws=60, **run)
        page = Page(result.report(tmp_path / f"{method}.html").read_text())
        assert ("Chains of the folds that mixed worst" in page.text) == chains
        assert "PIT" in page.text and "Calibration" in page.text
        assert "not drawn" not in page.text
        assert (method == "auto") == ("weights of full-data draws (40)" in page.text)


def test_the_command_line_writes_it(tmp_path, capsys):
    for name, result in (("a", many(1, 20)), ("b", many(2, 20, shift=3.0))):
        result.info.pop("identity", None)
        replace(result).save(tmp_path / f"{name}.nc")
    assert cli.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert "a predicts better than b" in Page((tmp_path / "report.html").read_text()).text
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "mail.html")]) == 0
    assert (tmp_path / "mail.html").is_file()


def test_importing_foldwise_leaves_templates_alone():
    program = "import sys, foldwise; assert not {'jinja2', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


# ---------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def driver():
    with chromium() as found:
        yield found


def folds(driver):
    return [
        [cell.get_property("textContent") for cell in row.find_elements("css selector", "td")]
        for row in driver.find_elements("css selector", "#foldtable tbody tr")[:5]
    ]


def heads(driver):
    cells = driver.find_elements("css selector", "#foldtable th")
    return {cell.get_property("textContent"): cell for cell in cells}


def test_a_browser_opens_it_without_complaints(driver, written, compared):
    driver.get(written.as_uri())
    assert driver.get_log("browser") == []
    assert compared.verdict.headline in driver.title
    box = driver.find_element("css selector", ".verdict")
    assert compared.verdict.sentence in box.text and box.is_displayed()
    loaded = "return [...document.images].every(i => i.complete && i.naturalWidth > 100)"
    assert driver.execute_script(loaded)


def test_the_table_of_folds_sorts_and_filters(driver, written, compared):
    driver.get(written.as_uri())
    driver.find_element("css selector", "#table summary").click()
    assert driver.find_element("id", "shown").text == "800 of 800"
    elpd = np.concatenate([r.folds["elpd"].values for r in compared.results.values()])
    column = list(heads(driver)).index("elpd")
    for direction, expected in (("ascending", np.sort(elpd)), ("descending", -np.sort(-elpd))):
        heads(driver)["elpd"].find_element("css selector", "button").click()
        assert heads(driver)["elpd"].get_attribute("aria-sort") == direction
        shown = [float(row[column]) for row in folds(driver)]
        np.testing.assert_allclose(shown, expected[:5], rtol=1e-3)
    driver.find_element("id", "filter").send_keys("county 39")
    assert driver.find_element("id", "shown").text == "22 of 800"  # 39 and 390 to 399
    driver.find_element("id", "filter").clear()
    driver.find_element("id", "filter").send_keys(" ")
    driver.find_element("id", "only").click()
    assert driver.find_element("id", "shown").text == "1 of 800"
    assert folds(driver)[0][:2] == ["good", "county 7"]


@pytest.mark.parametrize("width", [380, 1200])
def test_nothing_scrolls_sideways(driver, written, width):
    at_width(driver, width)
    driver.get(written.as_uri())
    assert driver.execute_script("return window.innerWidth") == width
    for element in driver.find_elements("css selector", "details > summary"):
        element.click()
    assert sideways(driver) <= 0


def test_it_prints(driver, written):
    driver.get(written.as_uri())
    printed = driver.execute_cdp_cmd("Page.printToPDF", {})["data"]
    assert base64.b64decode(printed).startswith(b"%PDF")
    opened = "dispatchEvent(new Event('beforeprint'));"
    opened += "return [...document.querySelectorAll('details')].every(d => d.open)"
    assert driver.execute_script(opened)


def test_a_model_called_script_does_nothing(driver, tmp_path):
    names = [f"{EVIL}{k}" for k in range(4)]
    results = {f"{EVIL}{k}": make(v, seed=k, names=names) for k, v in enumerate((A, B))}
    path = fw.compare(results).report(tmp_path / "evil.html")
    driver.get(path.as_uri())
    assert driver.execute_script("return window.evil") is None
    assert driver.get_log("browser") == []
    assert EVIL in driver.find_element("css selector", "h1").text
    driver.find_element("css selector", "#table summary").click()
    assert folds(driver)[0][1] == names[0]
