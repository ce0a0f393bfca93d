"""What `report_to` hands to accelerate's trackers arrives in their files."""

import struct

from tensorboardX.proto.event_pb2 import Event

from dflash.training.loop import Trainer
from toy import toy_config, toy_documents, toy_drafter, toy_source, toy_target


def events(folder):
    """The events in all TensorBoard files below a folder: records of length, checksum, message, checksum."""
    for path in sorted(folder.rglob("*tfevents*")):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]


def test_tensorboard_gets_every_line_of_metrics(tmp_path):
    target = toy_target()
    settings = {"max_steps": 4, "log_every": 2, "eval_every": 2, "eval_prompts": "unread"}
    config = toy_config(tmp_path, **settings, report_to=("tensorboard",), project="mine")
    trainer = Trainer(config, toy_drafter(), target, toy_documents(), toy_source(target), lambda draft: {"tau": 1.5})
    trainer.run()
    values = {}
    for event in events(tmp_path / "mine"):
        for value in event.summary.value:
            values.setdefault(value.tag, {})[event.step] = value.simple_value
    assert values["loss"].keys() == values["simulated_tau"].keys() == values["learning_rate"].keys() == {2, 4}
    assert values["eval_tau"] == {2: 1.5, 4: 1.5}
    assert len([tag for tag in values if tag.startswith("slot_accuracy/")]) == trainer.draft_config.proposals()
