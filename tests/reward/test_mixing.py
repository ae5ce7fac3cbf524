"""Language mixing by scripts: what is found, and above all what is not taken for it."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.reward.config import MixingConfig
from m2forge.reward.rule import foreign_share, mixing
from m2forge.text.message import Message, ToolCall
from tests.reward.sample import completion

DEFAULT = MixingConfig()
ENGLISH = "Please find out why the tests of this repository fail, and repair them."
CHINESE = "请帮我找出这个项目的测试为什么会失败，然后把它们修好。"
RUSSIAN = "Пожалуйста, выясни, почему не проходят тесты этого проекта, и исправь их."


def share(content: str, *, user: str = ENGLISH, thinking: str = "", config: MixingConfig = DEFAULT) -> float:
    return foreign_share(completion(content, thinking), (Message("user", user),), config)


# -- found ------------------------------------------------------------------------------------------------------------


def test_the_numbers_of_the_docstring() -> None:
    latin = "abcde " * 18
    assert share(latin + "我们是") == 0.0
    assert share(latin + "我们是这样") == 15 / 105
    found = mixing(completion(latin + "我们是这样", ""), (Message("user", ENGLISH),), DEFAULT)
    assert found == pytest.approx(0.683, abs=5e-4)


@pytest.mark.parametrize(
    ("user", "content"),
    [
        (ENGLISH, "First I 检查一下 the configuration, then 运行测试 once more."),
        (ENGLISH, "我先看一下测试的输出，然后再修改代码。"),
        (ENGLISH, "The fix is simple, поэтому мы просто меняем порядок вызовов."),
        (ENGLISH, "We look at the log 그리고 테스트를 다시 실행합니다 and stop."),
        (CHINESE, "我先看一下输出，then we should change the order of the calls，就可以了。"),
        (CHINESE, "The tests fail because the order of the calls is wrong."),
        (ENGLISH, "We change the order, και μετά τρέχουμε τις δοκιμές, and stop."),
        (RUSSIAN, "Сначала 检查一下配置文件 и потом запускаем тесты."),
        (RUSSIAN, "Сначала we have to look at the configuration и потом запускаем тесты."),
    ],
)
def test_mixed_prose_is_found(user: str, content: str) -> None:
    assert share(content, user=user) > DEFAULT.full_share / 2
    assert share("", user=user, thinking=content) > DEFAULT.full_share / 2


def test_single_ideographs_are_words() -> None:
    assert share("We 看 at it, then 我 and 他 go, and 你 come.") > DEFAULT.full_share


def test_terms_do_not_decide_whose_conversation_it_is() -> None:
    user = "用 python 写 parser，再写 tokenizer，改 dataset，加 logging"
    assert share("先写解析器，再写分词器。", user=user) == 0.0
    assert share("First we write the parser and then the rest.", user=user) == 1.0


def test_a_slip_of_the_assistant_does_not_excuse_the_next_one() -> None:
    slip = "Now 检查一下配置文件 again."
    context = (Message("user", ENGLISH), Message("assistant", slip))
    assert foreign_share(completion(slip, ""), context, DEFAULT) > DEFAULT.full_share


# -- not taken for mixing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("user", "content"),
    [
        pytest.param(ENGLISH, "The patch is by 张伟 and Łukasz Żółć, reviewed by Ёлкин.", id="names"),
        pytest.param(ENGLISH, "Let Δ = β² − 4αγ; then λ ≥ 0, ∑ᵢ xᵢ → ∞ and θ̂ ≈ μ ± 2σ.", id="symbols"),
        pytest.param(
            ENGLISH, "We have $\\text{скорость движения} = v$ and \\(\\text{时间间隔长度} = t\\).", id="formulas"
        ),
        pytest.param(ENGLISH, "Bold: 𝒙𝒚𝒛 𝔸𝔹ℂ 𝐯𝐞𝐜𝐭𝐨𝐫𝐬 𝑎𝑛𝑑 𝑚𝑜𝑟𝑒.", id="mathematical alphabets"),
        pytest.param(ENGLISH, "It works 🎉🎉🎉 👩‍👩‍👧‍👦 ✅ 🇯🇵 ①②③ ㊗ ™!", id="emoji"),
        pytest.param(
            ENGLISH, "Run this:\n```python\nprint('你好，世界，这是一个测试')\n```\nThen stop.", id="code block"
        ),
        pytest.param(ENGLISH, "Cut off:\n```python\nprint('你好，世界，这是一个测试')", id="code block left open"),
        pytest.param(ENGLISH, "The key is `настройки_пользователя` there.", id="inline code"),
        pytest.param(ENGLISH, 'The word "перестройка" and “водохранилище” and «благодарность».', id="quotations"),
        pytest.param(ENGLISH, "> 这是用户写的一整段话，我们引用它\n\nThat is clear.", id="quoted lines"),
        pytest.param(
            "Who wrote 红楼梦? Explain it in short, please.",
            "红楼梦 is by Cao, and 红楼梦 is long. 红楼梦!",
            id="user's",
        ),
        pytest.param(
            CHINESE, "先用 pytest 运行 test_loader.py，再看 DataLoader 和 num_workers 的设置。", id="identifiers"
        ),
        pytest.param(CHINESE, "这个 bug 在 dataset 的 token 缓存里，改 config 就行。", id="terms"),
        pytest.param(CHINESE, "见 https://example.org/a/b?c=d 和 /usr/local/lib/python3.11。", id="addresses"),
        pytest.param(CHINESE, "作者是 Guido van Rossum，1991 年发布。", id="Latin names"),
        pytest.param(RUSSIAN, "Запускаем pytest и смотрим stdout: всё работает в Docker.", id="Russian with terms"),
        pytest.param("テストを直してください。", "まず設定を確認してから、コードを修正します。", id="Japanese scripts"),
        pytest.param("शुरू करो, कृपया।", "मैं पहले परीक्षण चलाता हूँ, फिर ठीक करता हूँ।", id="vowel signs"),
        pytest.param("", "先看输出，再修改代码。", id="no letter in the context"),
        pytest.param("1 + 1 = ?", "Ответ равен двум.", id="only signs in the context"),
    ],
)
def test_what_is_no_mixing_is_not_taken_for_it(user: str, content: str) -> None:
    assert share(content, user=user) == 0.0
    assert share("", user=user, thinking=content) == 0.0


@pytest.mark.parametrize("content", ["Let Δ = β² − 4αγ; then λ ≥ 0 and μ ± 2σ.", "The letter Ж, or ש, stands alone."])
def test_single_letters_of_an_alphabet_are_symbols(content: str) -> None:
    assert share(content, config=MixingConfig(min_letters=1)) == 0.0


def test_identifiers_in_a_row_are_no_phrase() -> None:
    assert (
        share("用 DataLoader BatchSampler RandomSampler SequentialSampler 和 HTTP JSON API SQL。", user=CHINESE) == 0.0
    )


def test_a_bilingual_user_is_answered_in_either_language() -> None:
    user = f"Summarise this article in English, please: {CHINESE * 5}"
    assert share("The article says that the tests fail and why.", user=user) == 0.0
    assert share("这篇文章说测试失败了。", user=user) == 0.0
    assert share("Статья говорит о тестах и ошибках.", user=user) == 1.0


def test_with_home_in_the_completion_mixing_alone_is_penalised() -> None:
    config = MixingConfig(home="completion")
    assert share(CHINESE, config=config, thinking=ENGLISH) == 0.0
    assert share(CHINESE) == 1.0
    assert share("First I 检查一下 the configuration, then 运行测试 once more.", config=config) > 0.2


def test_arguments_of_calls_are_not_judged() -> None:
    writing = completion("I write the file.", "", (ToolCall("write", {"text": CHINESE}),))
    assert foreign_share(writing, (Message("user", ENGLISH),), DEFAULT) == 0.0


def test_without_a_user_the_system_message_decides() -> None:
    context = (Message("system", ENGLISH), Message("tool", CHINESE))
    assert foreign_share(completion("我先看一下，再说清楚。", ""), context, DEFAULT) == 1.0
    assert foreign_share(completion("I look at it first.", ""), context, DEFAULT) == 0.0


def test_the_measure_grows_from_the_allowed_to_the_full_share() -> None:
    context = (Message("user", ENGLISH),)
    config = MixingConfig(allowed_share=0.1, full_share=0.3, min_letters=1)
    found = [
        mixing(completion("a" * (100 - 3 * n) + "我" * n, ""), context, config) for n in (0, 1, 3, 5, 6, 9, 10, 20, 33)
    ]
    expected = [min(1.0, max(0.0, (0.03 * n - 0.1) / 0.2)) for n in (0, 1, 3, 5, 6, 9, 10, 20, 33)]
    assert found == pytest.approx(expected)


@given(st.text(), st.text(), st.text())
def test_any_text_has_a_measure_from_zero_to_one(thinking: str, content: str, user: str) -> None:
    context = (Message("user", user),)
    config = MixingConfig(min_letters=1)
    measured = mixing(completion(content, thinking), context, config)
    assert 0.0 <= measured <= 1.0
    assert measured == mixing(completion(content, thinking), context, config)


@given(st.text(st.characters(max_codepoint=0x24F)), st.text(st.characters(max_codepoint=0x24F)))
def test_latin_text_in_a_latin_conversation_is_never_mixed(content: str, user: str) -> None:
    assert share(content, user=f"{ENGLISH} {user}", config=MixingConfig(min_letters=1)) == 0.0


@pytest.mark.parametrize(
    "unit",
    ["a", "我", "“", "\\(", "\\[", "$", "`", "```", "> ", " ", "\n", "a我", "„", "«", '"', "a b ", "我 ", "~~~ "],
)
def test_the_time_is_linear_in_the_text(unit: str) -> None:
    def seconds(length: int) -> float:
        text = completion(unit * (length // len(unit)), "")
        started_s = time.thread_time()
        foreign_share(text, (Message("user", RUSSIAN),), DEFAULT)
        return time.thread_time() - started_s

    # Quadratic work would take ten seconds and more on so many characters; linear work takes a thirtieth of one.
    assert min(seconds(50_000) for _ in range(2)) < 1.0
