"""Chats with images, by a model that takes them: the answers are those of transformers alone."""

import asyncio
import base64
import importlib
import io
import json
import threading
from contextlib import closing

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import drumline
from drumline.checkpoint.config_files import read_processor
from drumline.errors import CheckpointError
from drumline.serving import http_server, protocol
from drumline.serving.front.remote_scheduler import RemoteScheduler
from drumline.serving.one_by_one import Prompt, generate_alone, inputs_to_text
from drumline.serving.prompt_reader import PromptReader
from drumline.serving.sampling import SamplingParams
from drumline.serving.scheduler import ServingLimits
from tests.drumline.serving.conftest import respond
from tests.drumline.serving.front.test_rank_worker import Client, ranks
from tests.drumline.test_families import OTHERS, pixels

for package in ("fastapi", "prometheus_client", "PIL"):
    pytest.importorskip(package, reason="runs after `pip install 'drumline[serve]'`")
Image = importlib.import_module("PIL.Image")
app = importlib.import_module("drumline.serving.app")
image_reader = importlib.import_module("drumline.serving.image_reader")

LIMITS = ServingLimits(max_length=60, max_running=4)
NUM_NEW = 10
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }} {% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def seeing(checkpoints):
    """A model that sees, with its processor, and its folder."""
    kind, config, _ = OTHERS["llava"]
    model, path = checkpoints.make("seeing", kind, **config)
    names = ["nothing", "begin", "end", *map(str, range(3, 60)), "<image>", "61", "62", "63"]
    words = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="nothing"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="nothing",
        bos_token="begin",
        eos_token="end",
        additional_special_tokens=["<image>"],
    )
    kind = getattr(transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor)
    sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    processor = transformers.LlavaProcessor(
        kind(**sizes),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="full",
        chat_template=TEMPLATE,
        num_additional_image_tokens=0,
    )
    processor.save_pretrained(path)
    return model, path, transformers.AutoProcessor.from_pretrained(path)


def picture(color, form="PNG", size=(20, 24)):
    file = io.BytesIO()
    image = Image.new("RGB", size, color)
    image.paste((255, 255, 255), (0, 0, size[0] // 2, size[1] // 3))
    image.save(file, form)
    return image, f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def part(url):
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def text(words):
    return {"type": "text", "text": words}


def expected(seeing, contents):
    """The text of transformers alone. contents: by message, of texts and images."""
    model, _, processor = seeing
    messages = [
        {
            "role": "user",
            "content": [
                text(each) if isinstance(each, str) else {"type": "image", "image": each}
                for each in content
            ],
        }
        for content in contents
    ]
    inputs = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    new = model.generate(**inputs, max_new_tokens=NUM_NEW, do_sample=False)
    new = new[0, inputs["input_ids"].shape[1] :]
    return processor.tokenizer.decode(new, skip_special_tokens=True).strip()


def service_of(seeing, model):
    endpoint = http_server.Endpoint.open(seeing[1], http_server.ServerSettings(seeing[1], port=0))
    endpoint.listener.close()
    return app.Service(["llava"], model, endpoint.tokenizer, LIMITS, images=endpoint.images)


async def chat(service, contents, path="chat/completions", **fields):
    """The status and the answer."""
    messages = [{"role": "user", "content": content} for content in contents]
    name = "input" if path == "responses" else "messages"
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    body = {"model": "llava", "temperature": 0, limit: NUM_NEW, name: messages, **fields}
    status, answer = await respond(service, body, path=path)
    return status, json.loads(answer)


@pytest.fixture(scope="module")
def answers(seeing, on_master):
    """What two ranks answer to requests that come at the same time."""
    (_, red), (_, blue) = picture("red"), picture("blue", "JPEG")
    of_responses = {"type": "input_image", "image_url": red}, {"type": "input_text", "text": "7 8"}
    source = {"type": "base64", "media_type": "image/png", "data": red.partition(",")[2]}

    def work(model):
        async def at_once():
            with closing(service_of(seeing, model)) as service:
                return await asyncio.gather(
                    chat(service, [[part(red), text("7 8")]]),
                    chat(service, ["7 8 9"]),
                    chat(service, [[text("5"), part(red), text("6"), part(blue)], "9"], n=2),
                    chat(service, [of_responses], path="responses"),
                    chat(service, [[{"type": "image", "source": source}, text("7 8")]], "messages"),
                )

        return asyncio.run(at_once())

    return on_master(seeing[1], 2, work)


def content_of(answer):
    return [choice["message"]["content"].strip() for choice in answer["choices"]]


def test_images_are_seen_as_by_transformers_alone(seeing, answers):
    """Every part but text was refused."""
    (red, _), (blue, blue_url) = picture("red"), picture("blue", "JPEG")
    blue = Image.open(io.BytesIO(base64.b64decode(blue_url.partition(",")[2]))).convert("RGB")
    assert [status for status, _ in answers] == [200] * 5
    one, plain, two, response, message = (answer for _, answer in answers)
    assert content_of(one) == [expected(seeing, [[red, "7 8"]])]
    assert content_of(plain) == [expected(seeing, [["7 8 9"]])]
    assert content_of(two) == [expected(seeing, [["5", red, "6", blue], ["9"]])] * 2
    seen = response["output"][-1]["content"][0]["text"].strip()
    assert seen == content_of(one)[0] != expected(seeing, [[blue, "7 8"]])
    assert message["content"][0]["text"].strip() == seen
    num_tokens = one["usage"]["prompt_tokens"], message["usage"]["input_tokens"]
    assert num_tokens == (6, 6)  # four patches and two words


@pytest.fixture(scope="module")
def service(seeing):
    with drumline.load(seeing[1]) as model, closing(service_of(seeing, model)) as service:
        yield service


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://example.org/a.png", "is not fetched by this server"),
        ("/etc/passwd", "is not fetched by this server"),
        ("data:image/png;base64,@@", "cannot be read"),
        ("data:image/png;base64,AAAA", "cannot be read"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "cannot be read"),
        (picture("red")[1][:120], "cannot be read"),
        (picture("red", size=(9000, 4000))[1], "36000000 pixels, more than 33554432"),
    ],
)
def test_an_image_that_cannot_be_taken_is_the_mistake_of_the_request(service, url, reason):
    status, answer = asyncio.run(chat(service, [[part(url), text("5")]]))
    assert status == 400 and reason in answer["error"]["message"]
    assert answer["error"]["param"] == "messages"


def test_a_template_that_has_no_place_for_an_image_is_said(service, monkeypatch):
    monkeypatch.setattr(service.tokenizer, "chat_template", "5 6")
    status, answer = asyncio.run(chat(service, [[part(picture("red")[1])]]))
    assert status == 400 and answer["error"]["param"] == "messages"


def test_images_that_come_to_more_than_a_request_may_hold_are_refused(service, monkeypatch):
    monkeypatch.setattr(image_reader, "MAX_INPUTS_NBYTES", 1000)
    status, answer = asyncio.run(chat(service, [[part(picture("red")[1])]]))
    assert status == 400 and "send fewer, or smaller" in answer["error"]["message"]


def test_many_images_are_refused_before_they_are_decoded(service):
    """Small files may be of gigabytes of pixels."""
    large, small = (picture("red", size=size)[1] for size in ((5000, 4000), (2, 3)))
    for urls, reason in (([large] * 2, "40000000 pixels"), ([small] * 65, "65 images are more")):
        with pytest.raises(protocol.ApiError, match=reason):
            service.prompts._images.read("<image>" * len(urls), urls, True)


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{{ messages[0]['content'] | trim }}", "5 6"),
        ("{% for part in messages[0]['content'] %}{{ part.text }} 8{% endfor %}", "5 6 8"),
        ("{{ messages[0]['content'][0]['text'] + ' 9' }}", "5 6 9"),
    ],
)
def test_a_text_reaches_a_template_in_the_form_that_it_takes(seeing, service, template, wanted):
    """All had lists, of which some made text."""
    reader = PromptReader(
        "llava", service.tokenizer, 100, service.scheduler, service.prompts._images
    )
    body = protocol.ChatCompletionRequest(
        model="llava", messages=[{"role": "user", "content": "5 6"}], add_special_tokens=False
    )
    before = service.tokenizer.chat_template
    service.tokenizer.chat_template = template
    try:
        (tokens,) = reader.of_chat(body)
    finally:
        service.tokenizer.chat_template = before
    assert service.tokenizer.decode(tokens) == wanted


@pytest.mark.parametrize(("given", "adds"), [(None, True), (True, True), (False, False)])
def test_special_tokens_are_added_where_the_request_says_so(service, monkeypatch, given, adds):
    """The field was taken, and ignored for a model with a processor."""
    kept, asked = service.prompts.text, []
    monkeypatch.setattr(
        service.prompts, "text", lambda *texts, **options: asked.append(options) or kept(*texts)
    )
    fields = {} if given is None else {"add_special_tokens": given}
    assert asyncio.run(chat(service, ["5 6"], **fields))[0] == 200
    assert asked == [{"add_special_tokens": adds}]


def test_images_of_all_requests_have_a_limit(service, monkeypatch):
    monkeypatch.setattr(app, "MAX_INPUTS_NBYTES", 1000)
    status, answer = asyncio.run(chat(service, [[part(picture("red")[1])]]))
    assert status == 429 and answer["error"]["code"] == "server_busy"
    assert asyncio.run(chat(service, ["5 6"]))[0] == 200


def test_a_model_without_a_processor_refuses_images(plain, loaded):
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(plain[1])
    with closing(app.Service(["llava"], loaded, tokenizer, LIMITS)) as service:
        status, answer = asyncio.run(chat(service, [[part(picture("red")[1])]]))
    assert status == 400 and "served without images" in answer["error"]["message"]


def test_a_processor_that_cannot_be_used_is_said_at_start(seeing, tmp_path, caplog):
    (tmp_path / "config.json").write_text((seeing[1] / "config.json").read_text())
    assert read_processor(tmp_path) is None
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="files of a processor that cannot be used"):
        read_processor(tmp_path)
    assert http_server._image_reader(tmp_path, None, {}) is None
    assert "requests with images will be refused" in caplog.text


def test_a_sequence_with_an_image_goes_on_with_other_ranks(seeing):
    red, url = picture("red")
    prompt = image_reader.ImageReader(seeing[2]).read("<image> 7 8", [url], True)
    scheduler, has_tokens = RemoteScheduler(LIMITS, print), threading.Semaphore(0)
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0, ignore_eos=True)
    client = Client(params, lambda: has_tokens.release() or True, prompt=prompt)
    with ranks(seeing[1], scheduler) as end:
        scheduler.submit([client.generation])
        for _ in range(4):
            assert has_tokens.acquire(timeout=60)
        end()
    assert scheduler.is_restarting and scheduler.num_waiting == 1
    with ranks(seeing[1], scheduler):
        tokens, *_ = client.result()
    words = seeing[2].tokenizer.decode(tokens, skip_special_tokens=True)
    assert words.strip() == expected(seeing, [[red, "7 8"]])


def test_the_types_of_tokens_grow_with_the_tokens(checkpoints):
    """A model that is given them for each token fails where they are fewer."""
    kind, config, _ = OTHERS["qwen3_vl"]
    model, _ = checkpoints.make("qwen3_vl_seeing", kind, **config)
    row = torch.tensor([[5, 61, 60, 60, 60, 60, 62, 7]])
    inputs = {
        "mm_token_type_ids": (row == 60).int(),
        "pixel_values": pixels(16, 3 * 2 * 8 * 8),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    whole = model.generate(row, **inputs, max_new_tokens=NUM_NEW, do_sample=False)[0].tolist()
    chosen = []

    def choose(logits):
        chosen.append(int(logits[0].argmax()))
        return chosen[-1:]

    prompt = Prompt(whole[:12], inputs_to_text(inputs))
    generate_alone(model, prompt, choose, lambda: len(chosen) == len(whole) - 12)
    assert whole[12:] == chosen
