"""Files and modules that the tests of specs share; no problem of a benchmark among them."""

import textwrap

import torch

PROBLEM = textwrap.dedent(
    '''
    """A linear map, a shift, a row softmax."""
    import torch

    rows, inner = 2048, 1024
    outer = 4095  # odd on purpose


    class Model(torch.nn.Module):
        """What is computed."""

        def __init__(self, inner, outer):
            super(Model, self).__init__()
            self.map = torch.nn.Linear(inner, outer)
            self.norm = torch.nn.BatchNorm1d(outer)

        def forward(self, x, shift):
            return torch.softmax(self.norm(self.map(x)) + shift, dim=-1)


    def get_inputs():
        return [torch.rand(rows, inner), 0.5]


    def get_init_inputs():
        return [inner, outer]
    '''
)


def problem(forward: str, inputs: str, sizes: str = "", init: str = "pass") -> str:
    """The text of a small problem file."""
    return textwrap.dedent(
        f"""
        import torch
        {sizes}

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                {init}

            def forward(self, x, *others):
                {forward}

        def get_inputs():
            return {inputs}

        def get_init_inputs():
            return []
        """
    )


class Nested(torch.nn.Module):
    """Takes and returns nested structures."""

    def forward(self, pair, table):
        return {"sum": pair[0] + table["a"], "rest": [pair[1] * 2, (table["b"],)]}
