"""Chat templates come out as transformers renders them; what they reject is the client's fault."""

from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import BadRequest, ModelUnsupported
from engine.model.refs import ModelFiles
from engine.text.load import load_tokenizer
from engine.text.template import ChatTemplate
from tests.unit.model_files_help import smollm_oracle, smollm_tokenizer, tiny_llama, write_gguf

VARIABLES = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": '<b>1 & 2</b> "é"\n'},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "and?"},
]
SOURCES = [
    pytest.param("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", id="plain"),
    pytest.param("  {% if true %}\n  x\n  {% endif %}\n{# c #}\ny", id="trimmed-blocks"),
    pytest.param("{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}", id="tojson"),
    pytest.param(
        "{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}"
        "{% if loop.first %}{% continue %}{% endif %}{{ m['content'] | trim }}{% endfor %}",
        id="loop-controls",
    ),
    pytest.param(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        id="generation-block",
    ),
    pytest.param(
        "{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% endfor %}{{ ns.n }}{{ undefined_name }}{{ eos_token }}",
        id="namespace",
    ),
    pytest.param(
        "{% if tools is none and documents is none and add_generation_prompt %}yes{% endif %}",
        id="options",
    ),
]


def theirs(messages, source=None):
    return smollm_oracle().apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize("source", SOURCES)
def test_a_template_renders_as_in_transformers(source):
    assert ChatTemplate(source, VARIABLES).render(MESSAGES) == theirs(MESSAGES, source)


@pytest.mark.parametrize("turns", [1, 2, 3, 4])
def test_the_default_model_s_template_renders_as_in_transformers(turns):
    for messages in (MESSAGES[:turns], MESSAGES[1 : 1 + turns]):
        assert smollm_tokenizer().render_chat(messages) == theirs(messages)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text()}
        ),
        min_size=1,
        max_size=5,
    )
)
def test_any_conversation_renders_as_in_transformers(messages):
    assert smollm_tokenizer().render_chat(messages) == theirs(messages)


def test_the_time_is_the_one_it_is_given():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, lambda: datetime(2024, 7, 1))
    assert template.render(MESSAGES) == "01 Jul 2024"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        pytest.param(
            "{{ raise_exception('roles must alternate') }}", "roles must alternate", id="raised"
        ),
        pytest.param("{{ messages[0]['nothing'].text }}", "nothing", id="undefined"),
        pytest.param("{{ 'a' + none }}", "NoneType", id="type"),
        pytest.param("{{ 1 / 0 }}", "division by zero", id="arithmetic"),
        pytest.param("{{ messages.append(1) }}", "append", id="immutable"),
        pytest.param("{{ ''.__class__.__mro__ }}", "__class__", id="sandboxed"),
        pytest.param("{{ range(10 ** 9) | list }}", "MAX_RANGE", id="bounded"),
    ],
)
def test_what_a_template_rejects_is_a_bad_request(source, says):
    with pytest.raises(BadRequest, match=says) as caught:
        ChatTemplate(source, VARIABLES).render(MESSAGES)
    assert caught.value.field == "messages"


def test_the_default_template_rejects_a_message_without_content():
    with pytest.raises(BadRequest):
        smollm_tokenizer().render_chat([{"role": "user"}])


def test_a_broken_template_is_refused_at_start():
    with pytest.raises(ModelUnsupported, match="chat template is not valid"):
        ChatTemplate("{% for m in messages %}", {})


def test_a_model_without_a_template_says_what_to_use_instead(tmp_path):
    path = tmp_path / "base.gguf"
    write_gguf(path, tiny_llama())
    tokenizer = load_tokenizer(ModelFiles("gguf", path, str(path)))
    with pytest.raises(
        BadRequest, match=r"base has no chat template; use /v1/completions"
    ) as caught:
        tokenizer.render_chat(MESSAGES)
    assert caught.value.field == "messages"
