"""Texts in WikiHow's format, and the tensors made of them."""

import pytest
import torch

from labs.experiments.hugging_face.batches import IGNORED, Task, batches, n_targets, of_rank
from labs.experiments.hugging_face.wikihow import Article, code_and_prose, documentation, read_csv


def test_a_csv_in_wikihows_format(tmp_path):
    path = tmp_path / "wikihow.csv"
    path.write_text(
        'headline,title,text\n"\nBoil it.,\nEat it.",How to Cook,"Take an egg.\n\nBoil."\n,No headline,Text\n'
    )
    assert read_csv(path) == [Article("Boil it., Eat it.", "How to Cook", "Take an egg. Boil.")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("title,text\na,b\n", "wikihow.csv has no column headline; WikiHow's are headline, title, text"),
        ("", "wikihow.csv has no column headline"),
        ("headline,title,text\n,,\n", "wikihow.csv has no row with a headline and a text"),
    ],
)
def test_what_is_no_wikihow(tmp_path, content, message):
    (tmp_path / "wikihow.csv").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_csv(tmp_path / "wikihow.csv")


def test_the_documentation_of_torch_has_headlines_and_texts():
    articles = documentation()
    assert len(articles) > 100
    assert any(article.title == "fully_shard" for article in articles)
    assert all(article.headline.endswith(".") and article.text for article in articles)
    pieces = code_and_prose()
    assert sum(label for _, label in pieces) * 2 == len(pieces) == 2 * len(articles)


def test_t5_reads_its_own_labels_one_place_later():
    batch = batches(Task("t5"), 1)[0]
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (8, 128)
    labels, read = batch["labels"], batch["decoder_input_ids"]
    assert labels.shape == read.shape == (8, 48)
    assert (read[:, 0] == 0).all()
    kept = labels[:, :-1] != IGNORED
    assert torch.equal(read[:, 1:][kept], labels[:, :-1][kept])


def test_padding_is_no_target(tmp_path):
    path = tmp_path / "w.csv"
    path.write_text("headline,title,text\nabc,t,some text\nabcdef,t,more text\n")
    batch = batches(Task("t5", rows=2, csv=str(path)), 1)[0]
    assert n_targets(batch) == 3 + 1 + 6 + 1  # bytes, and the end of each


def test_ranks_have_their_rows_of_one_batch():
    batch = batches(Task("bert"), 1)[0]
    parts = [of_rank(batch, rank, 2) for rank in range(2)]
    assert all(torch.equal(torch.cat([part[name] for part in parts]), batch[name]) for name in batch)
    assert n_targets(batch) == 8


def test_what_cannot_be_read():
    with pytest.raises(ValueError, match=r"csv=x\.csv: WikiHow is to be summarised, by model=t5"):
        batches(Task("bert", csv="x.csv"), 1)
    with pytest.raises(ValueError, match=r"rows=1000000, but there are only \d+ to read"):
        batches(Task("t5", rows=1000000), 1)
