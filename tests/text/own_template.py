"""Chat templates written for these tests, with the features of public ones, and formats over them."""

import functools
import re
from collections.abc import Sequence
from dataclasses import replace

from m2forge.text.template import TemplateFormat
from m2forge.text.tokenizer import Tokenizer, train_tokenizer
from m2forge.text.vocabulary import SpecialNames, Vocabulary
from tests.text.draw import TRAINING_TEXTS

# As Llama 3's: headers, tools inside the first user's message, one call at a time as bare JSON, trimmed texts.
LLAMA = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system + '<|eot_id|>' }}
{%- if tools is not none %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nCall by JSON {"name": ..., "parameters": ...}.\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- messages[0].content | trim + '<|eot_id|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}' + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
# As Mistral's: no generation prompt, tools before the last user's message, ids of nine characters.
MISTRAL = """
{%- set last = namespace(content='') %}
{%- for message in messages if message.role == 'user' %}{%- set last.content = message.content %}{%- endfor %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message.content == last.content %}
            {{- '[AVAILABLE_TOOLS]' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' }}{{- {'content': message.content, 'call_id': message.tool_call_id} | tojson }}
        {{- '[/TOOL_RESULTS]' }}
    {%- elif message.tool_calls %}
        {{- message.content + '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
            {{- ', "id": "' + call.id + '"}' + (', ' if not loop.last else '') }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- else %}
        {{- message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""
# As Qwen3's: tools, results that share a turn, and thinking that goes when a user's message follows.
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else '') + '\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set seen = namespace(user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set seen.user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > seen.user and message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# As Qwen3-Coder's: calls in XML, each argument as bare text.
CODER = """
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>\\n' }}
                {{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- if tools and loop.first %}{{- tools | tojson }}{%- endif %}{{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# As DeepSeek-R1's: the prompt opens thinking that no rendered answer has; an EOS token ends the conversation.
R1 = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|user|>' + message.content }}
    {%- elif message.role == 'system' %}{{- message.content }}
    {%- else %}{{- '<|assistant|>' + message.content.split('</think>')[-1] + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\\n' }}{%- else %}{{- '\\n' + eos_token }}{%- endif %}
"""
# As GLM-4's: answers end where the next turn opens; calls are keys and values.
GLM = """
{{- '[gMASK]' }}
{%- if tools %}{{- '<|system|>\\n' }}{{- tools | tojson }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>\\n<think>' + (message.reasoning_content or '') + '</think>\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name }}
            {%- for key, value in call.function.arguments | items %}
                {{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
                {{- value if value is string else value | tojson }}{{- '</arg_value>' }}
            {%- endfor %}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '<|observation|>\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
TEMPLATES = {"llama": LLAMA, "mistral": MISTRAL, "qwen": QWEN, "coder": CODER, "r1": R1, "glm": GLM}

_SPECIAL = re.compile(
    r"<\|[^<>|\s']+\|>|<｜[^<>｜\s']+｜>|\[/?[A-Z_]{4,}\]|</?(?:think|tool_call|(?:start|end)_of_turn)>"
)


@functools.cache
def trained(specials: tuple[str, ...]) -> Tokenizer:
    return train_tokenizer(TRAINING_TEXTS, 300 + len(specials), specials)


def tokenizer_of(
    template: str, *, names: SpecialNames | None = None, tool_use: str | None = None, specials: Sequence[str] = ()
) -> Tokenizer:
    """A small tokenizer whose special tokens are those that the template names."""
    own = names or SpecialNames(bos="<s>", eos="</s>")
    named = [name for name in (own.bos, own.eos) if name is not None]
    known = {*_SPECIAL.findall(template + (tool_use or "")), *named, "<|system|>", "<|user|>", *specials}
    vocabulary: Vocabulary = trained(tuple(sorted(known)))._vocabulary
    return Tokenizer(replace(vocabulary, names=own, chat_template=template, tool_use_template=tool_use))


@functools.cache
def template_format(template: str) -> TemplateFormat:
    return TemplateFormat(tokenizer_of(template))
