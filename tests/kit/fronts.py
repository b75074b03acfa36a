"""The front that captures steps of `pmt.compile`."""

from poetmodel.torch.capturing import joint


def use_dynamo():
    """Let TorchDynamo capture the steps of all tests that follow."""
    joint.USES_DYNAMO = True
