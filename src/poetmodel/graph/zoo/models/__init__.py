"""The models of the zoo."""

from poetmodel.graph.zoo.models.bert import bert_base, transformer
from poetmodel.graph.zoo.models.mlp import mlp
from poetmodel.graph.zoo.models.mobilenet import mobilenetv2
from poetmodel.graph.zoo.models.resnet import resnet18, resnet18_cifar, resnet50
from poetmodel.graph.zoo.models.vgg import vgg16, vgg16_cifar

__all__ = [
    "bert_base",
    "mlp",
    "mobilenetv2",
    "resnet18",
    "resnet18_cifar",
    "resnet50",
    "transformer",
    "vgg16",
    "vgg16_cifar",
]
