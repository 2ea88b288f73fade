"""Modules of PyTorch, and the files of models that are made of them; imported where a test runs, not before."""

import warnings

import torch

__all__ = [
    "ByKeyword",
    "FromDict",
    "Imaginary",
    "InPlace",
    "Recycling",
    "Shout",
    "SumAndDifference",
    "export",
    "script",
    "torch",
]


class SumAndDifference(torch.nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor):
        return left + right, left - right


class ByKeyword(torch.nn.Module):
    def forward(self, left: torch.Tensor, *, right: torch.Tensor):
        return {"sum": left + right, "diff": left - right}


class FromDict(torch.nn.Module):
    def forward(self, tensors: dict[str, torch.Tensor]):
        return {"sum": tensors["a"] + tensors["b"]}


class Shout(torch.nn.Module):
    def forward(self, words: list[str]) -> list[str]:
        return [word.upper() for word in words]


class InPlace(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        return x.add_(1)


class Imaginary(torch.nn.Module):
    """Returns a view whose elements are the negative of what its memory holds."""

    def forward(self, x: torch.Tensor):
        return torch.imag(torch.conj(torch.complex(x, x)))


class Recycling(torch.nn.Module):
    """Returns views of a buffer, which each run writes to and resizes."""

    def __init__(self):
        super().__init__()
        self.kept = torch.zeros(1)
        self.begun = False

    def forward(self, x: torch.Tensor):
        if bool((x < 0).any()):
            raise ValueError("negative")
        if not self.begun:
            # What is loaded from a file cannot be resized.
            self.kept = torch.zeros(1)
            self.begun = True
        self.kept.resize_([x.numel()])
        self.kept.copy_(x.flatten() * 2)
        return self.kept.view(x.shape), x.sum(dim=1, keepdim=True) > 4


def script(directory, module):
    (directory / "1").mkdir(parents=True)
    with warnings.catch_warnings():
        # TorchScript is deprecated; existing repositories are full of it.
        warnings.simplefilter("ignore")
        torch.jit.script(module).save(str(directory / "1" / "model.pt"))
    return directory


def export(directory, module, args, kwargs=None):
    (directory / "1").mkdir(parents=True)
    batch = torch.export.Dim("batch", min=1, max=64)
    dynamic = {name: {0: batch} for name in ("left", "right")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic)
        with (directory / "1" / "model.pt").open("wb") as file:
            torch.export.save(program, file)
    return directory
