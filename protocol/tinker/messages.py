"""The protobuf messages of the Tinker API, made from a table of their fields when this module is imported.

Readers of proto3 skip fields that they do not know, so an answer may carry one of ours: `versions` (100) of a sampled
sequence holds the policy version of each of its tokens, and an unmodified client never notices.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_TYPES = {"bytes": 12, "string": 9, "double": 1, "bool": 8, "int32": 5, "int64": 3, "uint32": 13}
_MESSAGE, _ONE, _MANY = 11, 1, 3
_PACKAGE = "headway.tinker"
# message: field=number:type. A * repeats a field, a ? is proto3's optional, %T is a map from string to T.
_TABLE = """
SparseCsr values=1:bytes crow_indices=2:bytes col_indices=3:bytes
Tensor dense=1:bytes sparse_csr=2:SparseCsr dtype=3:int32 shape=4:int64*
TopkLogprobs token_ids=1:bytes logprobs=2:bytes k=3:uint32 length=4:uint32
SampledSequence stop_reason=1:int32 tokens=2:bytes logprobs=3:bytes? topk_sampled_logprobs=4:TopkLogprobs versions=100:bytes
PromptAltTokens tokens=1:Tensor logprobs=2:Tensor
SampleResponse sequences=1:SampledSequence* prompt_logprobs=2:bytes? topk_prompt_logprobs=3:TopkLogprobs prompt_cache_hit_tokens=4:int32 target_prompt_logprobs=5:Tensor prompt_alt_tokens=6:PromptAltTokens
BatchedTensor data=1:bytes offsets=2:bytes dtype=3:int32 trailing_shape=4:int64*
ArrayRecord type_tag=1:string fields=2:%BatchedTensor num_datums=3:int64
ForwardBackwardOutput loss_fn_output_type=1:string loss_fn_outputs=2:ArrayRecord* metrics=3:%double
EncodedTextChunk tokens=1:bytes
Chunk encoded_text=1:EncodedTextChunk image=2:bytes dmel=3:bytes
Span sequence_id=1:string offset=2:int64 length=3:int64
ProvenanceSpan prompt_tokens=1:Span sampled_tokens=2:Span
Datum model_input=1:Chunk* loss_fn_inputs=2:%Tensor model_input_spans=3:ProvenanceSpan* loss_fn_input_spans=4:ProvenanceSpan*
LossConfigValue number=1:double? text=2:string?
ForwardBackwardRequest model_id=1:string seq_id=2:int32 data=3:Datum* loss_fn=4:string loss_fn_config=5:%double forward_only=6:bool loss_fn_config_v2=7:%LossConfigValue
"""  # noqa: E501 - a message a line


def _made() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="headway_tinker.proto", package=_PACKAGE, syntax="proto3")
    for line in _TABLE.strip().splitlines():
        name, *fields = line.split()
        message = file.message_type.add(name=name)
        for text in fields:
            _add_field(message, text)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{message.name}"))
        for message in file.message_type
    }


def _add_field(message: Any, text: str) -> None:
    name, _, rest = text.partition("=")
    number, _, kind = rest.partition(":")
    if kind.startswith("%"):
        _add_map(message, name, int(number), kind[1:])
        return
    plain = kind.rstrip("*?")
    field = message.field.add(name=name, number=int(number), label=_MANY if kind.endswith("*") else _ONE)
    field.type = _TYPES.get(plain, _MESSAGE)
    if field.type == _MESSAGE:
        field.type_name = f".{_PACKAGE}.{plain}"
    if kind.endswith("?"):
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def _add_map(message: Any, name: str, number: int, kind: str) -> None:
    entry = message.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
    entry.options.map_entry = True
    _add_field(entry, "key=1:string")
    _add_field(entry, f"value=2:{kind}")
    type_name = f".{_PACKAGE}.{message.name}.{entry.name}"
    message.field.add(name=name, number=number, label=_MANY, type=_MESSAGE, type_name=type_name)


MESSAGES: dict[str, Any] = _made()
"""Message classes by name."""
