"""What clients of other projects do with a server whose model repeats the last message up to `~`.

`client_programs.py NAME URL MODEL` runs in an environment with the client of that name. It ends with an error if an
answer is not what the message asked for.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import cache
from typing import Any

END = "~"
WEATHER = f'<tool_call>{{"name": "get_weather", "arguments": {{"place": "Bonn"}}}}</tool_call>{END}'
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
PLACE = f'{{"name": "Bonn"}}{END}'


@cache
def place_type() -> Any:
    """A model of pydantic, which not every environment has."""
    import pydantic

    class Place(pydantic.BaseModel):
        """A place."""

        name: str

    return Place


def get_weather(place: str) -> str:
    """Return the weather of a place."""
    return f"12 in {place}{END}"


def called(tool: str) -> str:
    return f'<tool_call>{{"name": "{tool}", "arguments": {{"name": "Bonn"}}}}</tool_call>{END}'


def expect(found: Any, expected: Any) -> None:
    if found != expected:
        raise SystemExit(f"found {found!r}, expected {expected!r}")


def langchain(url: str, model: str) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    place = place_type()
    for use_responses_api in (False, True):
        chat = ChatOpenAI(
            model=model, base_url=url, api_key="none", max_retries=0, use_responses_api=use_responses_api
        )  # fmt: skip
        expect(chat.invoke("hello" + END).text, "hello")
        expect("".join(chunk.text for chunk in chat.stream("hello" + END)), "hello")
        [call] = chat.bind_tools([tool(get_weather)]).invoke(WEATHER).tool_calls
        expect((call["name"], call["args"]), ("get_weather", {"place": "Bonn"}))
        expect(chat.with_structured_output(place, method="json_schema").invoke(PLACE), place(name="Bonn"))


def pydantic_ai(url: str, model: str) -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    place = place_type()
    provider = OpenAIProvider(base_url=url, api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        served = kind(model, provider=provider)
        expect(Agent(served, tools=[get_weather]).run_sync(WEATHER).output, "12 in Bonn")
        expect(Agent(served, output_type=place).run_sync(called("final_result")).output, place(name="Bonn"))
        expect(Agent(served, output_type=NativeOutput(place)).run_sync(PLACE).output, place(name="Bonn"))


def autogen(url: str, model: str) -> None:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    async def work() -> None:
        facts: Any = {"vision": False, "function_calling": True, "json_output": True, "family": "unknown",
                      "structured_output": True}  # fmt: skip
        client = OpenAIChatCompletionClient(model=model, base_url=url, api_key="none", model_info=facts)
        agent = AssistantAgent("agent", client, tools=[get_weather], reflect_on_tool_use=True)
        result = await agent.run(task=WEATHER)
        expect(result.messages[-1].to_text(), "12 in Bonn")
        await client.close()

    asyncio.run(work())


def instructor(url: str, model: str) -> None:
    import instructor as library
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    for mode, content in ((library.Mode.TOOLS, called("Place")), (library.Mode.JSON_SCHEMA, PLACE)):
        messages: Any = [{"role": "user", "content": content}]
        made = library.from_openai(client, mode=mode).chat.completions.create(
            model=model, response_model=place_type(), messages=messages, max_retries=0
        )
        expect(made.name, "Bonn")


def litellm(url: str, model: str) -> None:
    import litellm as library

    asked: Any = {"model": f"openai/{model}", "api_base": url, "api_key": "none"}
    messages = [{"role": "user", "content": "hello" + END}]
    expect(library.completion(messages=messages, **asked).choices[0].message.content, "hello")
    chunks = library.completion(messages=messages, stream=True, **asked)
    expect("".join(chunk.choices[0].delta.content or "" for chunk in chunks), "hello")
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
    [choice] = library.completion(messages=[{"role": "user", "content": WEATHER}], tools=tools, **asked).choices
    expect(json.loads(choice.message.tool_calls[0].function.arguments), {"place": "Bonn"})
    response = library.responses(input="hello" + END, **asked)
    expect(response.output[0].content[0].text, "hello")


def lm_eval(url: str, checkpoint: str) -> None:
    """Print what the harness ranks answers by: prompt, answer and log-probability, of a model with real weights."""
    from datasets import Dataset
    from lm_eval import simple_evaluate
    from lm_eval.api.task import ConfigurableTask

    rows = [
        {"question": f"What is {a} * {b}?", "choices": [f"The answer is {a * b + more}." for more in (0, 1, 10)]}
        for a in range(2, 10)
        for b in (3, 7)
    ]
    task = ConfigurableTask(
        config={
            "task": "sums",
            "custom_dataset": lambda **_options: {"test": Dataset.from_list(rows)},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": 0,
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        }
    )
    options = f"base_url={url}/completions,model={checkpoint},tokenizer={checkpoint},num_concurrent=4,max_retries=1"
    found: Any = simple_evaluate(
        model="local-completions", model_args=options, tasks=[task], apply_chat_template=True, bootstrap_iters=0
    )
    samples = found["samples"]["sums"]
    expect(len(samples), len(rows))
    pairs = [
        (*pair, float(score))
        for sample in samples
        for pair, [(score, _)] in zip(sample["arguments"], sample["resps"], strict=True)
    ]
    print(json.dumps({"accuracy": found["results"]["sums"]["acc,none"], "pairs": pairs}))


PROGRAMS = {
    "langchain": langchain,
    "pydantic-ai": pydantic_ai,
    "autogen": autogen,
    "instructor": instructor,
    "litellm": litellm,
    "lm-eval": lm_eval,
}


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](sys.argv[2], sys.argv[3])
