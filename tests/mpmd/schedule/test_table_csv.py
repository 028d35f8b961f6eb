"""Schedules from and to CSV."""

from __future__ import annotations

import pytest

from mmnnx.mpmd.schedule import (
    Action,
    Stages,
    check_table,
    get_schedule,
    read_schedule,
    schedule_names,
    simulate,
    write_schedule,
)

VEES = ["zbv", "dualpipe-v"]
LOOPING = ["interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble"]


@pytest.mark.parametrize("name", schedule_names())
def test_round_trip(name, tmp_path):
    meshes = [0, 1, 2, 2, 1, 0] if name in VEES else [0, 1, 2, 0, 1, 2] if name in LOOPING else [0, 1, 2]
    table = get_schedule(name).table(Stages.chain(meshes), 12)
    write_schedule(table, tmp_path / "schedule.csv")
    lines = (tmp_path / "schedule.csv").read_text().splitlines()
    assert [line.count(",") + 1 for line in lines] == [len(row) for row in table]
    assert read_schedule(tmp_path / "schedule.csv") == table


def test_what_is_written(tmp_path):
    path = str(tmp_path / "schedule.csv")  # a path may be a string
    write_schedule(get_schedule("zero-bubble-h1").table(Stages.chain((0, 1)), 2), path)
    with open(path) as file:
        assert file.read() == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"
    write_schedule([[Action(10, "backward", 123)], [], [Action(2, "forward", 0)]], path)
    with open(path) as file:
        assert file.read() == "10B123\n\n2F0\n"
    assert read_schedule(path) == [[Action(10, "backward", 123)], [], [Action(2, "forward", 0)]]


def test_cells_in_which_a_mesh_idles(tmp_path):
    """Interleaved 1F1B of two ranks as torch.distributed.pipelining lays it out: a column is a time step."""
    path = tmp_path / "torch.csv"
    path.write_bytes(
        b"0F0,0F1,2F0,2F1,,2B0,,2B1,,0B0,,0B1\r\n,1F0,1F1,3F0,3B0,3F1,3B1,,1B0,,1B1,\r\n",
    )
    table = read_schedule(path)
    stages = Stages.chain((0, 1, 0, 1))
    check_table(table, stages, 2)
    assert [len(row) for row in table] == [8, 8]
    assert table[1][:3] == [Action(1, "forward", 0), Action(1, "forward", 1), Action(3, "forward", 0)]
    assert simulate(table, stages).bubble == pytest.approx(1 / 5)


def test_a_file_from_a_spreadsheet(tmp_path):
    """It begins with a byte order mark; cells have quotes and spaces; rows are filled up."""
    path = tmp_path / "sheet.csv"
    path.write_bytes(b'\xef\xbb\xbf0F0,"0B0",,\r\n"1F0",1I0, 1W0 ,\r\n')
    assert read_schedule(path) == [
        [Action(0, "forward", 0), Action(0, "backward", 0)],
        [Action(1, "forward", 0), Action(1, "backward-input", 0), Action(1, "backward-weight", 0)],
    ]


@pytest.mark.parametrize(
    "cell", ["0X3", "F3", "0F", "0f3", "-1F0", "forward", "0F3 0B3", "(0F1;1B0)OVERLAP_F_B"]
)
def test_a_bad_cell(cell, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text(f"0F0,0B0\n1F0,,{cell}\n")
    with pytest.raises(ValueError) as error:
        read_schedule(path)
    message = str(error.value)
    assert message.startswith(f"{path}, row 2, column 3: {cell!r} is no action. Cells look like '0F3'")
    assert "backward" in message and "'0W3'" in message


@pytest.mark.parametrize("cell", ["0SEND_F3", "1RECV_F3", "0UNSHARD", "0RESHARD", "0REDUCE_GRAD"])
def test_a_cell_of_communication(cell, tmp_path):
    path = tmp_path / "lowered.csv"
    path.write_text(f"{cell},0F0\n")
    with pytest.raises(
        ValueError, match=rf"row 1, column 1: '{cell}' is communication. Only compute .*'0F3'"
    ):
        read_schedule(path)


def test_no_such_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_schedule(tmp_path / "none.csv")
